#!/usr/bin/env bash
# Writes requirements.lock: all packages of the groups of pyproject.toml, at the versions that pip resolves today. Those of
# the group `stack`, with all that they depend on, come first.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Usage: pip VENV ARGUMENTS...
pip() { "$work/$1/bin/python" -m pip --disable-pip-version-check "${@:2}"; }
for venv in all stack; do
  python3 -m venv "$work/$venv"
  pip $venv install --quiet --upgrade pip  # dependency groups need pip 25.1
done
pip all install --quiet --group stack --group dev
# The label of a build (+cpu) and CUDA's libraries depend on the machine, so the lock leaves them out.
pip all freeze --exclude pip --exclude setuptools | sed 's/+.*//' | grep -Ev '^(nvidia-(cu|nc|nv)|cuda-|triton==)' >"$work/pins"
pip stack install --quiet --dry-run --report "$work/report" --constraint "$work/pins" --group stack
python3 - "$work/report" "$work/pins" >"$work/lock" <<'END'
import json, re, sys

def normalized(name):
    return re.sub("[-_.]+", "-", name).lower()

report, pins = (open(path).read() for path in sys.argv[1:])
stack = {normalized(package["metadata"]["name"]) for package in json.loads(report)["install"]}
lines = sorted(pins.splitlines(), key=normalized)
print("# Written by 'make lock' from the groups of pyproject.toml. Do not edit.")
print("# Packages that serve, export and measure models:")
print(*(line for line in lines if normalized(line.partition("==")[0]) in stack), sep="\n")
print("# Other packages, for tests, development and Oracle Cloud:")
print(*(line for line in lines if normalized(line.partition("==")[0]) not in stack), sep="\n")
END
mv "$work/lock" requirements.lock
