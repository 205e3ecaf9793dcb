"""Where weights come from."""
