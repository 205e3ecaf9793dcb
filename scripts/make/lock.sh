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
python3 - "$work/report" >"$work/stack-pins" <<'END'
import json, sys
for package in json.load(open(sys.argv[1]))["install"]:
    print("{name}=={version}".format(**package["metadata"]).partition("+")[0])
END
{
  echo "# Written by 'make lock' from the groups of pyproject.toml. Do not edit."
  echo "# What serves, exports and measures models:"
  grep -ixFf "$work/stack-pins" "$work/pins"
  echo "# What else tests, development and Oracle Cloud need:"
  grep -vixFf "$work/stack-pins" "$work/pins"
} >"$work/lock"
mv "$work/lock" requirements.lock
