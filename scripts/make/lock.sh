#!/usr/bin/env bash
# Writes requirements.lock: all packages of the groups of pyproject.toml, at the versions that pip resolves today.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --upgrade pip  # dependency groups need pip 25.1
"${pip[@]}" install --quiet --group local --group export --group loadtest --group gateway --group dev
{
  echo "# Written by 'make lock' from the groups of pyproject.toml. Do not edit."
  # The label of a build (+cpu) and CUDA's libraries depend on the machine, so the lock leaves them out.
  "${pip[@]}" freeze --exclude pip --exclude setuptools | sed 's/+.*//' | grep -Ev '^(nvidia-(cu|nc|nv)|cuda-|triton==)'
} >"$work/lock"
mv "$work/lock" requirements.lock
