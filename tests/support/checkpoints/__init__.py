"""Save small models of real architectures with random weights, as save_pretrained does."""
