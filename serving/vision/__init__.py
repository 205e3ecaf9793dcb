"""Decode images, and run models that take them."""
