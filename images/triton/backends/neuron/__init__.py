"""AWS Neuron: the backend `neuron`, and the base classes for the model.py files that gen_triton_model.py writes."""

import sys
from pathlib import Path

# Makes `shared` importable wherever this package was found.
sys.path.append(str(Path(__file__).resolve().parents[1]))
