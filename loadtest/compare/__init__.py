"""Compare dynamic batching with the modes without it: make loadtest."""
