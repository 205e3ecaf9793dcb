"""The APIs, each a thin translation onto one path."""
