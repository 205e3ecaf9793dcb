"""Run networks on ONNX Runtime, OpenVINO or PyTorch, and choose among them."""
