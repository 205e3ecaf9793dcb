#!/usr/bin/env bash
# Installs packages that only some tests need beside the locked ones, once: LOCK FOLDER [NPM_PACKAGE...]
set -euo pipefail
cd "$(dirname "$0")/.."
lock=$1 folder=$2 npm_packages=("${@:3}")
[[ ! -e $folder ]] || exit 0

echo "installing $lock into $folder ($(sed -n '1s/^# //p' "$lock"))"
rm -rf "$folder.unfinished"
scripts/make/uv.sh .venv pip install --quiet --python .venv/bin/python --no-deps \
  --target "$folder.unfinished" --requirement "$lock"
if ((${#npm_packages[@]})) && command -v npm >/dev/null; then
  npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder.unfinished" "${npm_packages[@]}"
fi
mv "$folder.unfinished" "$folder"
