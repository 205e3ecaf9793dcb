"""Send rows of requests to Triton, and know what it serves."""
