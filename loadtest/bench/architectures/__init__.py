"""Serve small models of many architectures, and compare them with the library."""
