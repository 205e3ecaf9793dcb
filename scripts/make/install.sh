#!/usr/bin/env bash
# install.sh VENV LOCK [tools]: the locked packages in a virtual environment, all of them or only those of that group.
# Says in one sentence what the machine lacks.
set -euo pipefail
venv=$1 lock=$2 group=${3:-}

fail() {
  echo "error: $1" >&2
  exit 1
}

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python is not installed (Debian: apt install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) will not do: Python 3.11 is the least (say PYTHON=python3.11)"
old_enough='import sys; sys.exit(sys.version_info >= (3, 13))'
[[ -n $group ]] || "$python" -c "$old_enough" ||
  fail "$("$python" --version) will not do: Triton's wheel and numpy < 2 need Python 3.11 or 3.12 (say PYTHON=python3.11)"
"$python" -c 'import ensurepip' 2>/dev/null || fail "Python's venv module is missing (Debian: apt install python3-venv)"

if [[ -n $group ]]; then
  # pip knows dependency groups from 25.1 on, and the system's is older.
  read -ra names < <("$python" -c '
import sys, tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"][sys.argv[1]])' "$group")
  what=(--constraint "$lock" "${names[@]}")
else
  echo "installing the packages of $lock into $venv (2 GB, or 5 with PyTorch's CUDA build; once)"
  what=(--requirement "$lock")
fi
# One that is half made, or was made for less by a Python that is too new for all of it, is made again.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
  { [[ -z $group ]] && ! "$venv/bin/python" -c "$old_enough"; }; then
  "$python" -m venv --clear "$venv"
fi

# On a terminal, one line that moves; elsewhere, nothing.
progress() {
  if [[ -t 1 ]]; then
    awk '/^(Collecting|Using|Downloading|Installing) / { printf "\r\033[K  %s", substr($0, 1, 76); fflush() } END { printf "\r\033[K" }'
  else
    cat >/dev/null
  fi
}
"$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check "${what[@]}" | progress ||
  fail "pip could not install $lock; its message is above. Run the same command again to go on"
