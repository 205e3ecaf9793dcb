"""Show a page with a box for each system."""
