"""Talk to Triton: base classes of backends, requests and responses, parameters, metrics, traces."""
