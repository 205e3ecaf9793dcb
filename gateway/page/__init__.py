"""The page with a box for each system."""
