#!/usr/bin/env bash
# make test-docker: on a real engine, which it installs and starts where there is none and it may.
set -euo pipefail
cd "$(dirname "$0")/../.."

tests/docker/engine.sh || {
  echo "make test-docker ran nothing: there is no Docker engine here" >&2
  exit 1
}
tests/docker/base-images.sh
# Of earlier runs: images whose names are those of newer ones now.
for title in triton-transformers{,-exporter,-loadtest}; do
  docker image prune --force --filter "label=org.opencontainers.image.title=$title" >/dev/null
done
.venv/bin/python -m pytest tests/docker
