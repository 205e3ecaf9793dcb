#!/usr/bin/env bash
# make test-docker: on a real engine, which it installs and starts where there is none and it may.
set -euo pipefail
cd "$(dirname "$0")/../.."

tests/docker/engine.sh || {
  echo "make test-docker ran nothing: there is no Docker engine here" >&2
  exit 1
}
tests/docker/base-images.sh
.venv/bin/python -m pytest tests/docker
