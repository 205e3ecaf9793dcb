#!/usr/bin/env bash
# install.sh VENV LOCK GROUP: installs the locked packages of a group, or `all`, into a virtual environment.
# Checks what install.py itself needs, and stops with one sentence about what the machine lacks.
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

group=${3:?usage: install.sh VENV LOCK GROUP}
[[ $group != stack ]] || is_usable "$(pwd -P)" ||
  fail "$(pwd -P): Triton's Python processes do not start from such a path. Move this checkout to a path of ASCII letters, digits and . _ - + @ /"
[[ -w . ]] || fail "$(pwd -P) is not writable, and the packages are installed there: change that, or copy this checkout"

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python is not installed (Debian: apt install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old: the minimum is Python 3.11. Set PYTHON=python3.11"
[[ $group != all && $group != stack ]] || "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' ||
  fail "$("$python" --version) is too new: Triton's wheel and numpy < 2 need Python 3.11 or 3.12. Set PYTHON=python3.11"
"$python" -c 'import ensurepip' 2>/dev/null || fail "Python's venv module is missing (Debian: apt install python3-venv)"
exec "$python" "$(dirname "$0")/install.py" "$@"
