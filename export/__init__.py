"""Assemble the model repository: put the weights beside each config.pbtxt."""
