#!/usr/bin/env bash
# Prints the runtime that make is to use: RUNTIME (environment, then .env), else local while that stack runs here, else
# docker where an engine answers, else local.
set -euo pipefail
cd "$(dirname "$0")/../.."

local_runs() {
  local pid
  pid=$(cat "${LOCAL_STATE:-.local}/run/supervisord.pid" 2>/dev/null) && grep -qa supervisord "/proc/$pid/cmdline" 2>/dev/null
}

chosen=${RUNTIME:-}
if [[ -z $chosen && -e .env ]]; then
  chosen=$(sed -En "s/^(export )?RUNTIME=[\"']?([a-z]*).*/\2/p" .env | tail -n 1)
fi
if [[ -z $chosen ]]; then
  if ! local_runs && timeout 10 docker info >/dev/null 2>&1; then chosen=docker; else chosen=local; fi
fi
echo "$chosen"
