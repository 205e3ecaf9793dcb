#!/usr/bin/env bash
# setting.sh NAME: prints a setting before Python's packages are installed, in the order of triton_transformers/settings.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=$1 value=

# Prints the value without quotes, comment and blanks, from a dotenv file that may be missing.
value_in() {
  { grep -Es "^\s*(export\s+)?$name\s*=" "$1" || true; } | tail -n 1 | cut -d= -f2- |
    sed -E "s/^\s*'([^']*)'.*/\1/; t; s/^\s*\"([^\"]*)\".*/\1/; t; s/(^|\s+)#.*//; s/^\s+|\s+$//g"
}

case " ${TRITON_SETTINGS_NAMES:-} " in
  *" $name "* | *" * "*) value=${!name:-} ;;
esac
[[ -n $value ]] || value=$(value_in "${TRITON_SETTINGS_FILE:-.env}")
[[ -n $value ]] || value=$(value_in .env.example)
echo "$value"
