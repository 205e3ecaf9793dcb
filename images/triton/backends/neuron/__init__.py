"""AWS Neuron: the backend `neuron`, and what the model.py that gen_triton_model.py writes are made of."""

import sys
from pathlib import Path

# For `shared`, wherever this package was found.
sys.path.append(str(Path(__file__).resolve().parents[1]))
