"""Hugging Face's Inference API, at the address of each system."""

from tests.conformance.apis.run import Case

PATH = "/models/{model}"
CASES = [
    Case("hub-generate", PATH, {"inputs": "a"}, "tei", "tei", "counter"),
    Case("hub-pipeline", PATH, {"inputs": "a"}, "tei", system="summarization"),
]
