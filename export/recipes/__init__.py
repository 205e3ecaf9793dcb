"""Export each kind of model as files that Triton serves."""

import sys

# OpenVINO and NNCF report each import and export to Google through this package. So hide the package.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
