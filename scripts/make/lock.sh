#!/usr/bin/env bash
# Writes requirements.lock: all packages of the groups of pyproject.toml, at the newest versions that these allow, with the
# SHA-256 digests of their files on the index.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet --disable-pip-version-check "$(grep -o 'uv==[0-9.]*' pyproject.toml)"
PYTHONPATH=$PWD "$work/bin/python" - "$work" >"$work/pins" <<'END'
import subprocess, sys
from pathlib import Path
from scripts.make.install import pip_settings, uv_environment

work = Path(sys.argv[1])
command = [work / "bin/uv", "pip", "compile", "--python", work / "bin/python", "--quiet", "--no-header", "--no-annotate"]
command += ["--generate-hashes"]
command += [f"--no-emit-package={name}" for name in ("pip", "setuptools")]
command += [f"--group={name}" for name in ("install", "stack", "dev")]
sys.exit(subprocess.run(command, env=uv_environment(pip_settings(work))).returncode)
END
{
  echo "# Written by 'make lock' from the groups of pyproject.toml. Do not edit."
  # A line for each package. The label of a build (+cpu) and CUDA's libraries depend on the machine. PyTorch has no hashes,
  # because it comes from TORCH_INDEX or from PyPI, whose files differ.
  sed -e ':a; /\\$/ { N; s/ *\\\n */ /; ta }' "$work/pins" |
    sed -E -e 's/^(\S+)\+[^ ]+/\1/' -e 's/^(torch==\S+) .*/\1/' |
    grep -Ev '^(nvidia-(cu|nc|nv)|cuda-|triton==)'
} >"$work/lock"
mv "$work/lock" requirements.lock
