"""make loadtest: compare dynamic batching with the modes without it."""
