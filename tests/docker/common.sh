# shellcheck shell=bash
# What engine.sh and base-images.sh share.

# shellcheck disable=SC2034  # used by those who source this
state=${DOCKER_STATE:-/var/tmp/triton-transformers-docker}

die() {
  echo "$*" >&2
  exit 1
}

# The mirror this machine already uses: it may reach no other.
debian_mirror() {
  awk '$1 == "URIs:" { print $2; exit }' /etc/apt/sources.list.d/debian.sources
}

can_install() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ -n "$(debian_mirror 2>/dev/null)" ]
}

# Quiet when it works, everything when it does not.
quietly() {
  local said
  said=$("$@" 2>&1) || {
    echo "$said" >&2
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
