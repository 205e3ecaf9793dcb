"""Code that the backends share. Each backend's model.py puts this folder's parent on sys.path."""

import os
import sys

# Triton's Python processes ignore PYTHONPATH, but the local runtime puts the packages of TRANSFORMERS= there.
folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]

# OpenVINO reports each import to Google through this package, which pip installs with it. So hide the package.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
