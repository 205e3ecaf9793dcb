"""AWS Neuron: write the folders of models that were compiled elsewhere, set up the host."""
