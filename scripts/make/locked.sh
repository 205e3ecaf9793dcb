#!/usr/bin/env bash
# locked.sh VENV [arguments of `uv pip install`]: installs packages at the versions of uv.lock, with the uv in VENV. uv
# compares each file with the hashes of the lock.
#
# `uv sync --frozen` would download from the addresses in uv.lock, whatever index this machine uses (astral-sh/uv#19625).
# TORCH_INDEX: the index of PyTorch's CPU builds, which serves PyTorch alone: it could replace any other package.
# TRANSFORMERS: another release of transformers, which brings its own tokenizers and hub client.
# LOCKED: a regular expression of the packages to install at locked versions; without it, all.
set -euo pipefail
venv=$1
shift

# Leaves out uv's list of packages, which has a line for each. Downloads, steps and errors stay.
uv() { { "$(dirname "$0")/uv.sh" "$venv" "$@" 2>&1 >&3 | sed -u '/^ [-+~] /d' >&2; } 3>&1; }

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
# The environment keeps its own pip and setuptools, so the lock does not constrain them.
free='pip|setuptools'
[[ ${TRANSFORMERS:-transformers} == transformers ]] || free+='|transformers|tokenizers|huggingface-hub'
# A line for each package.
uv export --quiet --frozen --all-groups --no-header --no-annotate | sed -e ':a; /\\$/ { N; s/ *\\\n */ /; ta }' |
  grep -E "^(${LOCKED:-.*})==" | grep -Ev "^($free)==" >"$constraints"
torch=$(grep -o '^torch==[^ ]*' "$constraints" || true)
# PyTorch has no hashes, because the files of the two indexes differ. The lock has ONNX Runtime's build for CPUs. The
# build for CUDA must be of the same release.
sed -Ei -e 's/^(torch==[^ ]*).*/\1/' -e 's/^(onnxruntime)(==[^ ]*).*/&\n\1-gpu\2/' "$constraints"

export UV_PYTHON=${UV_PYTHON:-$venv/bin/python}
if [[ -n $torch && -n ${TORCH_INDEX:-} ]]; then
  from_index=(pip install --compile-bytecode --no-deps --default-index "$TORCH_INDEX" "$torch")
  # Without an answer, uv would try for minutes.
  if ! UV_HTTP_CONNECT_TIMEOUT=5 UV_HTTP_TIMEOUT=5 UV_HTTP_RETRIES=0 uv "${from_index[@]}" --quiet --dry-run 2>/dev/null ||
    ! uv "${from_index[@]}"; then
    echo "TORCH_INDEX=$TORCH_INDEX does not answer, or lacks $torch for this machine: PyTorch comes from PyPI," \
      "perhaps with CUDA (3 GB more)"
  fi
fi
uv pip install --compile-bytecode --constraint "$constraints" "$@"
