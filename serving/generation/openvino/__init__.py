"""Generate texts on OpenVINO GenAI."""
