"""Export language models for OpenVINO, vLLM and transformers."""
