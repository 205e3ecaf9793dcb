"""Generation on OpenVINO GenAI."""
