"""Break a running stack under a steady load, one fault after the other: make drill."""

import os

# gRPC's handlers of fork() print a line for each command that a drill runs.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
