"""Run texts of unequal length on PyTorch as one row of tokens."""
