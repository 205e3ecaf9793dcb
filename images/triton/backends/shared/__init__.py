"""What the backends of this folder share. Each backend's model.py puts this folder's parent on sys.path."""

import os
import sys

# Triton's Python processes are isolated from their environment; TRANSFORMERS= of the local runtime comes by it.
asked = os.environ.get("PYTHONPATH", "").split(os.pathsep)
sys.path[:0] = [folder for folder in asked if folder and folder not in sys.path]
