#!/usr/bin/env bash
# Install AWS Neuron's driver and tools on the host; the rest is in the containers. Run it again after a kernel update.
set -euo pipefail
umask 022 # apt's own user reads the files

apt_repository=https://apt.repos.neuron.amazonaws.com
dnf_repository=https://yum.repos.neuron.amazonaws.com
key=GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB
# Tests set another root of the file system.
root=${HOST_ROOT:-}
dry_run=false
supported="Ubuntu 22.04, Ubuntu 24.04 or Amazon Linux 2023"
more="for more, run: sudo dmesg | grep -i neuron; dkms status"

usage() {
  cat <<'USAGE'
usage: sudo scripts/neuron/setup-host.sh [--dry-run] [inf1|inf2|trn1]

Install AWS Neuron's driver and tools on Ubuntu 22.04, Ubuntu 24.04 or Amazon Linux 2023. The instance type names the
chip, unless you do. Safe to repeat.

  --dry-run   print the steps and change nothing; needs no root
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

# write FILE: write standard input to it, unless the file has that content already.
write() {
  local text
  text=$(cat)
  [[ $(cat "$root$1" 2>/dev/null) != "$text" ]] || return 0
  printf '+ write %s\n%s\n' "$1" "$text"
  $dry_run || printf '%s\n' "$text" >"$root$1"
}

detect_chip() {
  local instance
  instance=$(cat "$root/sys/devices/virtual/dmi/id/product_name" 2>/dev/null) || instance=unknown
  case $instance in
    inf1.*) echo inf1 ;;
    inf2.*) echo inf2 ;;
    trn1.* | trn1n.*) echo trn1 ;;
    *) fail "this machine ($instance) is no Inf1, Inf2 or Trn1 instance; if it is, name the chip: setup-host.sh inf2" ;;
  esac
}

# Drivers after 2.24 do not support Inf1.
driver_for() {
  if [[ $1 == inf1 ]]; then echo '2.24.*'; else echo '2.*'; fi
}

with_apt() { # driver version, code name of the release
  command -v curl >/dev/null || fail "curl is not installed: apt-get install curl"
  export DEBIAN_FRONTEND=noninteractive
  run install -d -m 755 "$root/etc/apt/keyrings"
  # Download it each time, because AWS renews the key.
  run curl -fsSL "$apt_repository/$key" -o "$root/etc/apt/keyrings/neuron.asc"
  write /etc/apt/sources.list.d/neuron.list <<<"deb [signed-by=/etc/apt/keyrings/neuron.asc] $apt_repository $2 main"
  run apt-get update
  # The driver of Neuron 1.x has another package name and the same kernel module.
  if dpkg-query -s aws-neuron-dkms 2>/dev/null | grep '^Status: .* installed$' >/dev/null; then
    run apt-get remove -y aws-neuron-dkms
  fi
  run apt-get install -y --allow-downgrades "linux-headers-$(uname -r)" "aws-neuronx-dkms=$1" 'aws-neuronx-tools=2.*'
}

with_dnf() { # driver version
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

report() { # chip
  local devices running installed
  shopt -s nullglob
  devices=("$root"/dev/neuron[0-9]*)
  ((${#devices[@]})) || fail "the driver is loaded, but there is no /dev/neuron0: is this an $1 instance? $more"
  # After an update that could not reload the module, the old one still runs.
  running=$(cat "$root/sys/module/neuron/version" 2>/dev/null) || running=
  installed=$(modinfo -F version neuron)
  [[ -z $running || $running == "$installed" ]] ||
    fail "driver $installed is installed, but $running still runs: restart the machine"
  echo
  echo "driver $installed: ${devices[*]#"$root"}"
  command -v docker >/dev/null ||
    echo "Docker is not installed, and make up needs it with compose v2: https://docs.docker.com/engine/install"
  [[ $1 != inf1 ]] || echo "An upgrade of all packages installs a driver without Inf1; run this again after it."
  echo "next: make up PROFILE=neuron NEURON_CHIP=$1 NEURON_DEVICES=${#devices[@]}"
}

chip=
for argument; do
  case $argument in
    --dry-run) dry_run=true ;;
    inf1 | inf2 | trn1) chip=$argument ;;
    -h | --help) usage && exit ;;
    *) fail "unknown argument: $argument (see setup-host.sh --help)" ;;
  esac
done

[[ -r $root/etc/os-release ]] || fail "/etc/os-release is missing; use $supported"
# shellcheck source=/dev/null
. "$root/etc/os-release"
case "$ID ${VERSION_ID:-}" in
  "ubuntu 22.04" | "ubuntu 24.04") install=(with_apt "$VERSION_CODENAME") ;;
  "amzn 2023"*) install=(with_dnf) ;;
  *) fail "${PRETTY_NAME:-$ID} is not supported; use $supported" ;;
esac
[[ -n $chip ]] || chip=$(detect_chip)
$dry_run || ((EUID == 0)) || fail "this installs packages: run it with sudo, or print the steps with --dry-run"

"${install[0]}" "$(driver_for "$chip")" "${install[@]:1}"
[[ -e $root/dev/neuron0 ]] || run modprobe neuron || fail "the driver is installed, but does not load; $more"
$dry_run || report "$chip"
