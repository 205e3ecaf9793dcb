"""Prepare texts, tools, images and vectors for all APIs."""
