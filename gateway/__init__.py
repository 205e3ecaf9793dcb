"""The front door: an OpenAI-compatible API in front of Triton, with keys, limits and a page."""
