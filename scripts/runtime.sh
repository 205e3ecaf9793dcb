#!/usr/bin/env bash
# Prints the runtime that make is to use: RUNTIME (environment, then .env), else docker where an engine answers, else local.
set -euo pipefail
cd "$(dirname "$0")/.."

chosen=${RUNTIME:-}
if [[ -z $chosen && -e .env ]]; then
  chosen=$(sed -n 's/^RUNTIME=//p' .env | tail -n 1)
fi
if [[ -z $chosen ]]; then
  if timeout 10 docker info >/dev/null 2>&1; then chosen=docker; else chosen=local; fi
fi
echo "$chosen"
