"""Assembling the model repository: the weights that belong beside each config.pbtxt."""
