"""AWS Neuron: models compiled, folders for models compiled elsewhere, the host set up."""
