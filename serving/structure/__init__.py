"""Structured output: what a request may ask for, compiled to grammars."""
