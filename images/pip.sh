#!/usr/bin/env bash
# pip.sh [VENV arguments of `uv pip install`]: installs packages at their locked versions into a virtual environment, in a
# build; without arguments, only uv. It uses the build secrets pip_conf (a pip configuration) and ca (more certificates).
set -euo pipefail
[[ ! -s /run/secrets/pip_conf ]] || export PIP_CONFIG_FILE=/run/secrets/pip_conf
if [[ -s /run/secrets/ca ]]; then
  cat /etc/ssl/certs/ca-certificates.crt /run/secrets/ca >/tmp/ca.pem
  export PIP_CERT=/tmp/ca.pem GIT_SSL_CAINFO=/tmp/ca.pem
fi
# Images copy other folders, so they have neither uv nor pip.
(($#)) || exec uv.sh /opt/uv cache dir
venv=$1
shift
[[ -e $venv ]] || python3 -m venv --without-pip "$venv"
# The cache is on another file system.
UV_PYTHON=$venv/bin/python UV_LINK_MODE=copy locked.sh /opt/uv "$@"

packages=$(echo "$venv"/lib/python3.*/site-packages)
# Triton's Python processes, which ignore PYTHONPATH, find `serving` and `triton_transformers` there.
echo /opt/triton-transformers >"$packages/triton-transformers.pth"
rm -rf "$packages"/openvino_telemetry*  # reports the use of OpenVINO's tools
# A server keeps only the part of OpenVINO that runs models on a CPU: a third of its 180 MB serves other devices, a tenth
# reads other formats. The exporter, which has nncf, converts from PyTorch.
[[ -d $packages/nncf ]] || rm -rf \
  "$packages"/openvino/{cmake,include,tools,torch,libs/cache.json} \
  "$packages"/openvino/frontend/{jax,paddle,pytorch,tensorflow} \
  "$packages"/openvino/libs/libopenvino_{auto,auto_batch,hetero,intel_gpu,intel_npu}_plugin.so \
  "$packages"/openvino/libs/libopenvino_{c,gguf_frontend,jax_frontend,paddle_frontend,pytorch_frontend}.so.* \
  "$packages"/openvino/libs/libopenvino_{tensorflow,tensorflow_lite}_frontend.so.*
# xgrammar has a static library too, and 30 MB of debug symbols. NVIDIA's images, whose size is another, have no `strip`.
if [[ -d $packages/xgrammar ]]; then
  rm -rf "$packages/xgrammar/lib"
  ! command -v strip >/dev/null || strip "$packages"/xgrammar/*.so
fi
