#!/usr/bin/env bash
# Writes requirements.lock: every package that the groups of pyproject.toml bring, at the version pip resolves today.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --upgrade pip  # dependency groups need pip 25.1
"${pip[@]}" install --quiet --group local --group export --group loadtest --group dev
{
  echo "# Written by 'make lock' from the groups of pyproject.toml. Do not edit."
  # A build's label (+cpu) and CUDA's libraries belong to one machine, not to the lock.
  "${pip[@]}" freeze --exclude pip --exclude setuptools | sed 's/+.*//' | grep -Ev '^(nvidia-(cu|nc|nv)|cuda-|triton==)'
} >"$work/lock"
mv "$work/lock" requirements.lock
