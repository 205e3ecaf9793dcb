"""How each kind of model becomes files that Triton serves."""
