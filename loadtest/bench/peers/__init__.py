"""Compare this stack with other ways to serve the same model: `make bench BENCH=peers`.

rotation.py       the command: installs, starts and measures the servers in turn
known_peers.py    the servers: how each starts, and the settings that are tried
running.py        a started server: wait for it, check its answers, pause it, stop it
*_server.py, requirements/: the sources and the packages of the servers
"""

import sys

# OpenVINO reports each import to Google through this package. So hide the package.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
