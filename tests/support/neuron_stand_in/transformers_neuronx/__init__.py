"""Stand-in of transformers-neuronx, as far as the `neuron` backend uses it."""
