#!/usr/bin/env bash
# install.sh VENV LOCK GROUP: installs the locked packages of a group, or `all`, into a virtual environment.
# Checks what install.py itself needs, and stops with one sentence about what the machine lacks.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 1
}

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python is not installed (Debian: apt install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old: the minimum is Python 3.11. Set PYTHON=python3.11"
[[ ${3:?usage: install.sh VENV LOCK GROUP} != all && $3 != stack ]] || "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' ||
  fail "$("$python" --version) is too new: Triton's wheel and numpy < 2 need Python 3.11 or 3.12. Set PYTHON=python3.11"
"$python" -c 'import ensurepip' 2>/dev/null || fail "Python's venv module is missing (Debian: apt install python3-venv)"
exec "$python" "$(dirname "$0")/install.py" "$@"
