#!/usr/bin/env bash
# Installs packages in a build, with the build secrets pip_conf (a pip configuration) and ca (additional certificates).
# pip.sh: installs uv into /opt/uv. Images copy other folders, so they have neither uv nor pip.
# pip.sh VENV [arguments of `uv pip install`]: installs packages at their locked versions into a virtual environment.
set -euo pipefail
[[ ! -s /run/secrets/pip_conf ]] || export PIP_CONFIG_FILE=/run/secrets/pip_conf
if [[ -s /run/secrets/ca ]]; then
  cat /etc/ssl/certs/ca-certificates.crt /run/secrets/ca >/tmp/ca.pem
  export PIP_CERT=/tmp/ca.pem GIT_SSL_CAINFO=/tmp/ca.pem
fi
if (($# == 0)); then
  python3 -m venv /opt/uv
  exec /opt/uv/bin/pip install --quiet --disable-pip-version-check "$(grep -o 'uv==[0-9.]*' pyproject.toml)"
fi

venv=$1
shift
# The lock sets all versions; a transformers of the user's choice brings its own tokenizers and hub client.
constraints=/tmp/constraints.txt
if [[ ${TRANSFORMERS:-transformers} == transformers ]]; then
  cp requirements.lock $constraints
else
  grep -Eiv '^(transformers|tokenizers|huggingface[-_]hub)=' requirements.lock >$constraints
fi
[[ -e $venv ]] || python3 -m venv --without-pip "$venv"
# The cache is another file system. Containers cannot write compiled modules.
export UV_LINK_MODE=copy UV_NO_PROGRESS=1
/opt/uv/bin/python "$(dirname "$0")/uv_pip.py" --python "$venv/bin/python" --compile-bytecode \
  --constraint $constraints "$@"

packages=$(echo "$venv"/lib/python3.*/site-packages)
rm -rf "$packages"/openvino_telemetry*  # reports the use of OpenVINO's tools
# A server keeps only the part of OpenVINO that runs models on a CPU: a third of its 180 MB serves other devices, a tenth
# reads other formats. The exporter, which has nncf, converts from PyTorch.
[[ -d $packages/nncf ]] || rm -rf \
  "$packages"/openvino/{cmake,include,tools,torch,libs/cache.json} \
  "$packages"/openvino/frontend/{jax,paddle,pytorch,tensorflow} \
  "$packages"/openvino/libs/libopenvino_{auto,auto_batch,hetero,intel_gpu,intel_npu}_plugin.so \
  "$packages"/openvino/libs/libopenvino_{c,gguf_frontend,jax_frontend,paddle_frontend,pytorch_frontend}.so.* \
  "$packages"/openvino/libs/libopenvino_{tensorflow,tensorflow_lite}_frontend.so.*
