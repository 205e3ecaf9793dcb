#!/usr/bin/env bash
# install.sh VENV GROUP: installs a dependency group of pyproject.toml, or `all`, at the versions of uv.lock. Stops with
# one sentence if this machine lacks something.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 1
}

# The rule of scripts/stack/local/preflight.py.
is_usable() {
  local LC_ALL=C
  [[ $1 =~ ^[A-Za-z0-9_./+@-]+$ ]]
}

venv=$1 group=${2:?usage: install.sh VENV GROUP}
python=${PYTHON:-python3} make=$(dirname "$0")
[[ $group != stack ]] || is_usable "$(pwd -P)" ||
  fail "$(pwd -P): Triton's Python processes do not start from such a path. Move this checkout to a path of ASCII letters, digits and . _ - + @ /"
[[ -w . ]] || fail "$(pwd -P) is not writable, and the packages are installed there: change that, or copy this checkout"
command -v "$python" >/dev/null || fail "$python is not installed (Debian: apt install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old: the minimum is Python 3.11. Set PYTHON=python3.11"
"$python" -c 'import ensurepip' 2>/dev/null || fail "Python's venv module is missing (Debian: apt install python3-venv)"

exec 9>"$venv.lock"
flock --nonblock 9 || { echo "another command installs into $venv: waiting" && flock 9; }
trap 'echo "interrupted: run the same command again to continue" >&2; exit 130' INT

size=
if [[ $group == stack || $group == all ]]; then
  size=": 2 GB, or 5 with PyTorch's CUDA build"
  old_enough='import sys; sys.exit(sys.version_info >= (3, 13))'
  "$python" -c "$old_enough" ||
    fail "$("$python" --version) is too new: Triton's wheel and numpy < 2 need Python 3.11 or 3.12. Set PYTHON=python3.11"
  # `make` may have installed the tools with a newer Python, with Docker.
  [[ ! -e $venv/bin/python ]] || "$venv/bin/python" -c "$old_enough" || rm -rf "$venv"
  TORCH_INDEX=$("$make/setting.sh" TORCH_INDEX)
  export TORCH_INDEX
fi
groups=("--group=$group")
[[ $group != all ]] || groups=(--group=install --group=stack --group=dev)
echo "installing the packages of ${group/#all/all groups} (pyproject.toml) into $venv, once$size"
echo "from ${TORCH_INDEX:+$TORCH_INDEX (PyTorch) and }the index of pip, which is PyPI unless it is configured"
"$make/locked.sh" "$venv" "${groups[@]}" ||
  fail "uv could not install the packages: see its message above. Run the same command again to continue"
echo "installed in $SECONDS s"
