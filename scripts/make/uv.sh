#!/usr/bin/env bash
# uv.sh VENV COMMAND...: runs the uv that uv.lock pins, and installs it into the virtual environment first. uv reads no
# configuration of pip: pass on its settings for indexes and connections. uv's own variables replace them.
set -euo pipefail
venv=$1
shift

fail() {
  echo "error: $1" >&2
  exit 1
}

"$venv/bin/python" -c "import pip" 2>/dev/null || "${PYTHON:-python3}" -m venv --clear "$venv"
locked=$(sed -n '/^name = "uv"$/,/^$/p' uv.lock)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' <<<"$locked")
if [[ $("$venv/bin/uv" --version 2>/dev/null) != "uv $version "* ]]; then
  # On standard input, because pip takes hashes from files only.
  { echo "uv==$version" && grep -o 'sha256:[0-9a-f]*' <<<"$locked" | sed 's/^/--hash=/'; } | tr '\n' ' ' |
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --force-reinstall --requirement /dev/stdin ||
    fail "pip could not install uv $version: see its message above. Run the same command again to continue"
fi

configuration=$("$venv/bin/python" -m pip config list) || fail "pip cannot read its configuration: see its message above"
# Prints the words of a setting. pip's variables replace its files, and [install] replaces [global].
pip_setting() {
  local section line
  for section in :env: install global; do
    line=$(grep "^$section\.$1=" <<<"$configuration") || continue
    sed "s/^[^=]*='//; s/'\$//; s/\\\\n/ /g; s#~/#$HOME/#g" <<<"$line" | xargs
    return
  done
}
while read -r setting variable; do
  value=$(pip_setting "$setting")
  [[ -z $value || -n ${!variable:-} ]] || export "$variable=$value"
done <<END
index-url UV_DEFAULT_INDEX
extra-index-url UV_INDEX
find-links UV_FIND_LINKS
trusted-host UV_INSECURE_HOST
cert SSL_CERT_FILE
client-cert SSL_CLIENT_CERT
proxy ALL_PROXY
timeout UV_HTTP_TIMEOUT
default-timeout UV_HTTP_TIMEOUT
END
[[ -z ${UV_FIND_LINKS:-} ]] || export UV_FIND_LINKS=${UV_FIND_LINKS// /,}
# If several indexes have a version, pip takes the best of all their wheels, and uv the best of the first index. The main
# index has all wheels; another may have only one without a library that it needs.
[[ -z ${UV_INDEX:-} ]] || export UV_INDEX="${UV_DEFAULT_INDEX:-https://pypi.org/simple} $UV_INDEX"
[[ $1 != pip || ! $(pip_setting no-index) =~ ^(1|true|yes|on)$ ]] || set -- "$@" --no-index
# pip reads these two as well.
bundle=${CURL_CA_BUNDLE:-${REQUESTS_CA_BUNDLE:-}}
[[ -z $bundle || -n ${SSL_CERT_FILE:-} ]] || export SSL_CERT_FILE=$bundle
export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
# pip takes the best version of all indexes; uv would take the first index that has the package.
export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
# A read-only home has no place for a cache.
cache=$("$venv/bin/uv" cache dir 2>/dev/null) && mkdir -p "$cache" 2>/dev/null && [[ -w $cache ]] || export UV_NO_CACHE=1
exec "$venv/bin/uv" "$@"
