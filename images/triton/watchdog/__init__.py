"""The watchdog of tritonserver. Standard library only: it runs in every image, beside the backends' folder `shared`."""

import os
import sys
from pathlib import Path

BACKENDS = Path(os.environ.get("TRITON_HOME", "/opt/tritonserver")) / "backends"
sys.path.append(str(BACKENDS))
