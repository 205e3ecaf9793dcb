"""Compare what Triton would serve with the original, in this process."""
