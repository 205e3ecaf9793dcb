#!/usr/bin/env bash
# TensorFlow beside the locked packages (1.4 GB), in the folder TENSORFLOW, for the tests that serve SavedModels.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${TENSORFLOW:?is the folder to install it into, such as .local/tensorflow}
[[ ! -e $folder ]] || exit 0

echo "installing tests/tensorflow.lock into $folder (1.4 GB; once)"
rm -rf "$folder.unfinished"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
  --target "$folder.unfinished" --requirement tests/tensorflow.lock
mv "$folder.unfinished" "$folder"
