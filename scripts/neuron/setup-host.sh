#!/usr/bin/env bash
# setup-host.sh: AWS Neuron's driver and tools on the host; all else is in the containers. Again after a new kernel.
set -euo pipefail
umask 022 # apt's own user reads what is written here

apt_repository=https://apt.repos.neuron.amazonaws.com
dnf_repository=https://yum.repos.neuron.amazonaws.com
key=GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB
# Where the machine's files are: a test says another place.
root=${HOST_ROOT:-}
dry_run=false
supported="Ubuntu 22.04, Ubuntu 24.04 and Amazon Linux 2023"
why="sudo dmesg | grep -i neuron, and dkms status, tell more"

usage() {
  cat <<'USAGE'
usage: sudo scripts/neuron/setup-host.sh [--dry-run] [inf1|inf2|trn1]

Installs AWS Neuron's driver and tools on Ubuntu 22.04, Ubuntu 24.04 or Amazon Linux 2023. The chip is found from the
instance where it is not said. Safe to repeat.

  --dry-run   print what it would do, change nothing; needs no root
USAGE
}

fail() {
  echo "error: $1" >&2
  exit 1
}

run() {
  printf '+'
  printf ' %q' "$@"
  echo
  $dry_run || "$@"
}

# write FILE: what stands on the input, unless it is what is there.
write() {
  local text
  text=$(cat)
  [[ $(cat "$root$1" 2>/dev/null) != "$text" ]] || return 0
  printf '+ write %s\n%s\n' "$1" "$text"
  $dry_run || printf '%s\n' "$text" >"$root$1"
}

chip_here() {
  local instance
  instance=$(cat "$root/sys/devices/virtual/dmi/id/product_name" 2>/dev/null) || instance=unknown
  case $instance in
    inf1.*) echo inf1 ;;
    inf2.*) echo inf2 ;;
    trn1.* | trn1n.*) echo trn1 ;;
    *) fail "this machine ($instance) is no Inf1, Inf2 or Trn1 instance; if it is, say which: setup-host.sh inf2" ;;
  esac
}

# Drivers after 2.24 know Inf1 no more.
driver_for() {
  if [[ $1 == inf1 ]]; then echo '2.24.*'; else echo '2.*'; fi
}

with_apt() { # driver, the release's code name
  command -v curl >/dev/null || fail "curl is not installed: apt-get install curl"
  export DEBIAN_FRONTEND=noninteractive
  run install -d -m 755 "$root/etc/apt/keyrings"
  # Each time: keys are renewed.
  run curl -fsSL "$apt_repository/$key" -o "$root/etc/apt/keyrings/neuron.asc"
  write /etc/apt/sources.list.d/neuron.list <<<"deb [signed-by=/etc/apt/keyrings/neuron.asc] $apt_repository $2 main"
  run apt-get update
  # The driver of Neuron 1.x has another name, and the same module.
  if dpkg-query -s aws-neuron-dkms 2>/dev/null | grep '^Status: .* installed$' >/dev/null; then
    run apt-get remove -y aws-neuron-dkms
  fi
  run apt-get install -y --allow-downgrades "linux-headers-$(uname -r)" "aws-neuronx-dkms=$1" 'aws-neuronx-tools=2.*'
}

with_dnf() { # driver
  write /etc/yum.repos.d/neuron.repo <<REPOSITORY
[neuron]
name=AWS Neuron
baseurl=$dnf_repository
enabled=1
gpgcheck=1
gpgkey=$dnf_repository/$key
metadata_expire=0
REPOSITORY
  if rpm -q aws-neuron-dkms >/dev/null 2>&1; then
    run dnf remove -y aws-neuron-dkms
  fi
  run dnf install -y "kernel-devel-uname-r = $(uname -r)" "aws-neuronx-dkms-$1" 'aws-neuronx-tools-2.*'
}

say_what_is_there() { # chip
  local devices running installed
  shopt -s nullglob
  devices=("$root"/dev/neuron[0-9]*)
  ((${#devices[@]})) || fail "the driver is loaded, but there is no /dev/neuron0: is this an $1 instance? $why"
  # An update that could not reload the module leaves the old one running.
  running=$(cat "$root/sys/module/neuron/version" 2>/dev/null) || running=
  installed=$(modinfo -F version neuron)
  [[ -z $running || $running == "$installed" ]] ||
    fail "driver $installed is installed, but $running still runs: restart the machine"
  echo
  echo "driver $installed: ${devices[*]#"$root"}"
  command -v docker >/dev/null ||
    echo "Docker is not installed, and make up needs it: https://docs.docker.com/engine/install, with compose v2."
  [[ $1 != inf1 ]] || echo "An upgrade of all packages brings a driver without Inf1: run this again after one."
  echo "next: make up PROFILE=neuron NEURON_CHIP=$1 NEURON_DEVICES=${#devices[@]}"
}

chip=
for argument; do
  case $argument in
    --dry-run) dry_run=true ;;
    inf1 | inf2 | trn1) chip=$argument ;;
    -h | --help) usage && exit ;;
    *) fail "no such argument: $argument (setup-host.sh --help)" ;;
  esac
done

[[ -r $root/etc/os-release ]] || fail "there is no /etc/os-release: $supported are supported"
# shellcheck source=/dev/null
. "$root/etc/os-release"
case "$ID ${VERSION_ID:-}" in
  "ubuntu 22.04" | "ubuntu 24.04") install=(with_apt "$VERSION_CODENAME") ;;
  "amzn 2023"*) install=(with_dnf) ;;
  *) fail "${PRETTY_NAME:-$ID} is not supported: $supported are" ;;
esac
[[ -n $chip ]] || chip=$(chip_here)
$dry_run || ((EUID == 0)) || fail "this installs packages: run it with sudo, or see what it would do with --dry-run"

"${install[0]}" "$(driver_for "$chip")" "${install[@]:1}"
[[ -e $root/dev/neuron0 ]] || run modprobe neuron || fail "the driver was installed, and does not load: $why"
$dry_run || say_what_is_there "$chip"
