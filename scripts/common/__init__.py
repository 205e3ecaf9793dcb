"""Modules that every feature may import. They import no feature."""
