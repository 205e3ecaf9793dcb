"""Code that the backends share. Each backend's model.py puts this folder's parent on sys.path."""

import os
import sys

# Triton's Python processes ignore their environment, but the local runtime sets TRANSFORMERS= through PYTHONPATH.
folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]

# Through this package, which pip installs with it, OpenVINO reports each import to Google. Without it, it does not.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
