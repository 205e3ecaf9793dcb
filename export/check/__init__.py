"""Compare the models that Triton would serve with the original, in this process."""
