# shellcheck shell=bash
# Functions that the scripts beside this file share.

# shellcheck disable=SC2034  # the scripts that source this file use it
state=${DOCKER_STATE:-/var/tmp/triton-transformers-docker}

die() {
  echo "$*" >&2
  exit 1
}

engine_answers() { timeout 10 docker info >/dev/null 2>&1; }

# The mirror of this machine's apt, because the machine may reach no other.
debian_mirror() {
  awk '$1 == "URIs:" { print $2; exit }' /etc/apt/sources.list.d/debian.sources
}

can_install() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ -n "$(debian_mirror 2>/dev/null)" ]
}

# Print a command's output only if the command fails.
quietly() {
  local output
  output=$("$@" 2>&1) || {
    echo "$output" >&2
    return 1
  }
}

install_packages() {
  export DEBIAN_FRONTEND=noninteractive
  # An interrupted run leaves packages half configured, and then apt refuses everything.
  quietly dpkg --configure -a &&
    quietly apt-get update &&
    quietly apt-get install -y --no-install-recommends "$@"
}

# Unpack packages of Debian trixie into a folder, without adding trixie to the system's apt: FOLDER PACKAGE...
unpack_from_trixie() {
  local folder=$1 work=$1.unfinished
  shift
  rm -rf "$folder" "$work"
  mkdir -p "$work"/apt/{lists,cache}
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(debian_mirror) trixie main" \
    >"$work/apt/sources.list"
  local private=(-o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache"
    -o Dir::State::status=/dev/null -o APT::Sandbox::User=root)
  (
    cd "$work/apt" && quietly apt-get "${private[@]}" update && quietly apt-get "${private[@]}" download "$@"
  ) || return 1
  for package in "$work"/apt/*.deb; do dpkg -x "$package" "$work"; done
  rm -r "$work/apt"
  mv "$work" "$folder"
}
