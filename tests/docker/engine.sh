#!/usr/bin/env bash
# Makes sure that a Docker engine, compose v2 and buildx answer: does nothing if they do, else installs and starts them
# (on Debian, as root). The engine stays up until stop-engine.sh stops it; its log is ${DOCKER_STATE}/dockerd.log.
set -euo pipefail
# shellcheck source=tests/docker/common.sh
. "$(dirname "$0")/common.sh"

plugins_answer() { docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; }

install_engine() {
  ! command -v dockerd >/dev/null || ! command -v iptables >/dev/null || return 0
  install_packages docker.io iptables || die "docker.io could not be installed; apt's message is above."
  # The package starts the engine and has it start at each boot. start_engine starts one that can be stopped.
  if [[ -d /run/systemd/system ]]; then quietly systemctl disable --now docker.service docker.socket; fi
}

start_engine() {
  local log=$state/dockerd.log settings=()
  # A cache that the engine prunes by itself may lose a layer that a build is about to use.
  if ! [ -e /etc/docker/daemon.json ]; then
    echo '{"builder": {"gc": {"enabled": false}}}' >"$state/daemon.json"
    settings=(--config-file "$state/daemon.json")
  fi
  for _ in {1..600}; do
    engine_answers && return
    if ! pidof dockerd >/dev/null; then
      # A killed engine leaves its pid file, and the next engine refuses to start if any process has that number.
      rm -f /var/run/docker.pid
      # In a session of its own, to outlive the caller's terminal; without our lock, which it would hold for good.
      setsid nohup dockerd "${settings[@]}" >>"$log" 2>&1 </dev/null 9>&- &
      echo $! >"$state/dockerd.pid"
    fi
    sleep 0.5
  done
  die "dockerd did not answer within 300 s; see $log."
}

# bookworm has neither plugin. trixie's are static programs.
install_plugins() {
  local plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
  mkdir -p "$plugins"
  unpack_from_trixie "$state/trixie" docker-compose docker-buildx ||
    die "compose and buildx could not be downloaded from Debian trixie; apt's message is above."
  install "$state"/trixie/usr/libexec/docker/cli-plugins/* "$plugins"
  rm -rf "$state/trixie"
}

engine_answers && plugins_answer && exit
can_install || die "No Docker engine with compose v2 and buildx answers, and only root on Debian can install one here."

mkdir -p "$state"
exec 9>"$state/lock"
# Two runs at once would fight over apt and the pid file. The apt of a killed run holds this lock, too.
flock 9
if ! engine_answers; then
  install_engine
  start_engine
  # The cache of an earlier engine may name layers that are gone ("layer does not exist"), and it fills the disk.
  docker builder prune --force --all >/dev/null
fi
plugins_answer || install_plugins
plugins_answer || die "docker does not find compose and buildx in ${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins."
