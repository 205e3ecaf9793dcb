"""AWS Neuron: what the backend `neuron` serves, and the base classes for the files that gen_triton_model.py writes."""
