"""Measure windows, and compute the numbers and the verdict."""
