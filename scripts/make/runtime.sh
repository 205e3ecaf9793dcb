#!/usr/bin/env bash
# Prints the runtime: RUNTIME if it is set, else local while the local stack runs here, else docker if an engine answers.
set -euo pipefail
cd "$(dirname "$0")/../.."

local_stack_runs() {
  local state pid
  state=$(scripts/make/setting.sh LOCAL_STATE)
  pid=$(cat "${state/#\~\//$HOME/}/run/supervisord.pid" 2>/dev/null) &&
    grep -qa supervisord "/proc/$pid/cmdline" 2>/dev/null
}

runtime=$(scripts/make/setting.sh RUNTIME)
if [[ -z $runtime ]]; then
  if ! local_stack_runs && timeout 10 docker info >/dev/null 2>&1; then runtime=docker; else runtime=local; fi
fi
echo "$runtime"
