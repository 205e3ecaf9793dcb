#!/usr/bin/env bash
# Prints the runtime: RUNTIME if it is set, else local while the local stack runs here, else docker if an engine answers.
set -euo pipefail
cd "$(dirname "$0")/../.."

# Finds supervisord by its environment, because its files may have been deleted while it runs.
local_stack_runs() {
  local state cmdline home=~ # HOME may be unset
  state=$(scripts/make/setting.sh LOCAL_STATE)
  state=$(realpath -ms "${state/#\~\//$home/}")
  while read -r cmdline; do
    ! grep -qszxF "STATE=$state" "${cmdline%/*}/environ" || return 0
  done < <(grep -lszxF supervisor.supervisord /proc/[0-9]*/cmdline)
  return 1
}

runtime=$(scripts/make/setting.sh RUNTIME)
if [[ -z $runtime ]]; then
  if ! local_stack_runs && timeout 10 docker info >/dev/null 2>&1; then runtime=docker; else runtime=local; fi
fi
echo "$runtime"
