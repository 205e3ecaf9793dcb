"""AWS Neuron: the accelerators of a target, and the compiler."""
