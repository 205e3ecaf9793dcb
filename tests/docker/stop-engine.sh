#!/usr/bin/env bash
# Stops the engine that engine.sh started, with its containers; does nothing if engine.sh started none.
set -euo pipefail
# shellcheck source=tests/docker/common.sh
. "$(dirname "$0")/common.sh"

[[ -e $state/dockerd.pid ]] || exit 0
pid=$(<"$state/dockerd.pid")
# The number may be another process's by now.
if [[ $(ps -o comm= -p "$pid" 2>/dev/null) == dockerd ]]; then
  kill "$pid"
  for _ in {1..600}; do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.5
  done
  ! kill -0 "$pid" 2>/dev/null || die "dockerd (pid $pid) did not stop within 300 s; see $state/dockerd.log."
fi
rm -f "$state/dockerd.pid"
