#!/usr/bin/env bash
# pip.sh VENV [arguments of pip install]: installs packages at their locked versions into a virtual environment, in a
# build. It uses the build secrets pip_conf (a pip configuration) and ca (additional certificates).
set -euo pipefail
venv=$1
shift

[[ ! -s /run/secrets/pip_conf ]] || export PIP_CONFIG_FILE=/run/secrets/pip_conf
if [[ -s /run/secrets/ca ]]; then
  cat /etc/ssl/certs/ca-certificates.crt /run/secrets/ca >/tmp/ca.pem
  export PIP_CERT=/tmp/ca.pem GIT_SSL_CAINFO=/tmp/ca.pem
fi
# The lock sets all versions; a transformers of the user's choice brings its own tokenizers and hub client.
locked=/tmp/locked.txt constraints=/tmp/constraints.txt report=/tmp/report.json
if [[ ${TRANSFORMERS:-transformers} == transformers ]]; then
  cp requirements.lock $locked
else
  grep -Eiv '^(transformers|tokenizers|huggingface[-_]hub)=' requirements.lock >$locked
fi
# With hashes in the constraints, pip would refuse every package that has none, such as PyTorch: check them afterwards.
sed 's/ --hash=.*//' $locked >$constraints
# The lock has ONNX Runtime's build for CPUs. The build for CUDA must be of the same release.
sed -n 's/^onnxruntime==/onnxruntime-gpu==/p' $constraints >/tmp/gpu.txt
cat /tmp/gpu.txt >>$constraints
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PIP_ROOT_USER_ACTION=ignore

# A separate pip, so that the image has none, and one that knows dependency groups.
pip=/opt/pip/bin/pip
if [[ ! -e $pip ]]; then
  python3 -m venv /opt/pip
  $pip install pip==26.3
fi
[[ -e $venv ]] || python3 -m venv --without-pip "$venv"
$pip --python "$venv/bin/python" install --report $report --constraint $constraints "$@"
python3 - $locked $report <<'END'
"""Fail if an installed file has none of the hashes that the lock allows."""
import json, re, sys
from pathlib import Path

lines = Path(sys.argv[1]).read_text().splitlines()
allowed = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower(): set(re.findall(r"sha256:(\w+)", line)) for line in lines}
for item in json.loads(Path(sys.argv[2]).read_text())["install"]:
    name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
    found = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
    if allowed.get(name) and found not in allowed[name]:
        sys.exit(f"{item['download_info']['url']} has the SHA-256 {found}, "
                 "which requirements.lock does not allow: check the index, or run 'make lock' if you trust the file")
END

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
