"""PyTorch encoders that run texts of unequal length as one row of tokens."""
