#!/usr/bin/env bash
# Writes requirements.lock: all packages of the groups of pyproject.toml, at the newest versions that these allow.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet --disable-pip-version-check "$(grep -o 'uv==[0-9.]*' pyproject.toml)"
"$work/bin/uv" pip compile --quiet --no-header --no-annotate --no-emit-package pip --no-emit-package setuptools \
  --group install --group stack --group dev >"$work/pins"
{
  echo "# Written by 'make lock' from the groups of pyproject.toml. Do not edit."
  # The label of a build (+cpu) and CUDA's libraries depend on the machine.
  sed 's/+.*//' "$work/pins" | grep -Ev '^(nvidia-(cu|nc|nv)|cuda-|triton==)'
} >"$work/lock"
mv "$work/lock" requirements.lock
