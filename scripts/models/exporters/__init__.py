"""Export each kind of model as files that Triton serves."""
