#!/usr/bin/env bash
# Prints the path of a kubectl that renders with kustomize 5: the one on the PATH, else the one of Debian trixie, which it
# unpacks into FOLDER once.
set -euo pipefail
# shellcheck source=tests/docker/common.sh
. "$(dirname "$0")/docker/common.sh"
folder=$1

if command -v kubectl >/dev/null && kubectl version --client 2>/dev/null | grep -q '^Kustomize Version: v[5-9]'; then
  command -v kubectl
  exit
fi
if [[ ! -e $folder ]]; then
  mkdir -p "$(dirname "$folder")"
  unpack_from_trixie "$folder" kubectl ||
    die "No kubectl 1.27 or later is on the PATH, and Debian trixie's could not be unpacked here: install kubectl."
fi
echo "$folder/usr/bin/kubectl"
