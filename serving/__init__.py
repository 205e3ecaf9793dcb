"""Serve models inside Triton's processes. Importing this finds TRANSFORMERS, and keeps OpenVINO from reporting."""

import os
import sys

# The local runtime names the folder of TRANSFORMERS there, and the image with vLLM that of our packages:
# TRITON-FAULTS.md#locale-and-pythonpath.
folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]

# OpenVINO reports each import to Google through this package, which is installed with it. So hide the package.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
