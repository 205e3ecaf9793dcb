#!/usr/bin/env bash
# make test-docker: tests on a real Docker engine. If none answers, installs and starts one, with consent, and stops it
# at the end, so that `make up` does not choose Docker afterwards because of a test.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=tests/docker/common.sh
. tests/docker/common.sh

# CI=true or INSTALL_DOCKER=1, or yes on a terminal.
consent() {
  local answer=n
  if [[ ${CI:-} == true || ${INSTALL_DOCKER:-} == 1 ]]; then return; fi
  if [[ -t 0 ]]; then
    read -rp "No Docker engine answers. Install Docker on this machine (apt, as root) and start it? [y/N] " answer
  fi
  [[ $answer == [yY]* ]]
}

if ! engine_answers; then
  consent || die "No Docker engine answers. Start it, or let the tests install and start it: \
make test-docker INSTALL_DOCKER=1"
  trap tests/docker/stop-engine.sh EXIT
fi
tests/docker/engine.sh
tests/docker/base-images.sh
# Remove images of earlier runs that newer ones of the same name replaced.
for title in triton-transformers{,-exporter,-gateway,-loadtest}; do
  docker image prune --force --filter "label=org.opencontainers.image.title=$title" >/dev/null
done
# The tests of one stack wait most of the time, while others build images. BuildKit builds a step once if several builds
# need it at once.
.venv/bin/python -m tests.rerun tests/docker --numprocesses 2 --max-worker-restart 0 --dist loadfile \
  --no-loadscope-reorder
