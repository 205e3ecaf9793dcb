"""What runs a network: ONNX Runtime, OpenVINO or PyTorch, and the choice among them."""
