"""Stand-in of NxD Inference, as far as the `neuron` backend uses it."""
