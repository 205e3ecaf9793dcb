#!/usr/bin/env bash
# Starts Triton from the settings of .env.example. The one place that turns them into tritonserver's flags, in every runtime.
set -euo pipefail

home=${TRITON_HOME:-/opt/tritonserver}
# Restricted to whoever has the key: what loads code, maps memory or changes the server.
restricted=model-repository,shared-memory,trace,logging
# Oracle Cloud's word for a deployment of Triton. Nobody there has the key: what is restricted stays shut.
if [[ ${CONTAINER_TYPE:-} == TRITON ]]; then
  export TRITON_ADMIN_KEY="${TRITON_ADMIN_KEY:-$(python3 -c 'import secrets; print(secrets.token_urlsafe())')}"
fi
# HTTP wants the header's name, gRPC wants the metadata key's; the key's value is the same.
key="triton-admin-key=${TRITON_ADMIN_KEY:?is empty: run make up, which makes one}"

export BIND_ADDRESS=${BIND_ADDRESS:-127.0.0.1}

# What each Python process starts with: 64 MiB, or so much that 16 of them fit where nobody gave the container more than
# Docker's own 64 MB of shared memory. Less than 4 MiB Triton refuses. Not every df knows --output.
shm=${TRITON_SHM_BYTES:-}
if [[ -z $shm ]]; then
  there=$({ df --output=size -B1 /dev/shm 2>/dev/null || true; } | tail -n 1)
  [[ $there =~ ^\ *[1-9][0-9]*$ ]] || there=$((16 * 64 << 20))
  shm=$((there / 16 < 4 << 20 ? 4 << 20 : there / 16 > 64 << 20 ? 64 << 20 : there / 16))
fi

flags=(
  --model-repository="${MODEL_REPOSITORY:-/models}"
  --backend-directory="$home/backends"
  --cache-directory="$home/caches"
  --model-control-mode=explicit
  # A model's configs/<profile>.pbtxt goes before its config.pbtxt.
  --model-config-name="${PROFILE:-cpu}"
  # A model that does not load leaves the others served; readiness and `make status` tell.
  --exit-on-error=false
  # Requests in flight get this long. After a failed reload Triton waits it out in vain, and its own default is 30.
  --exit-timeout-secs=10
  --http-address="$BIND_ADDRESS" --http-port="${TRITON_HTTP_PORT:-8000}"
  --grpc-address="$BIND_ADDRESS" --grpc-port="${TRITON_GRPC_PORT:-8001}"
  --metrics-address="$BIND_ADDRESS" --metrics-port="${TRITON_METRICS_PORT:-8002}"
  --http-restricted-api="$restricted:$key"
  --grpc-restricted-protocol="$restricted:$key"
  --backend-config="python,shm-default-byte-size=$shm"
  --log-verbose="${TRITON_LOG_VERBOSE:-0}"
)
# On a machine without a GPU Triton looks for one all the same, and complains.
[[ ${PROFILE:-cpu} == cuda ]] || flags+=(--allow-gpu-metrics=false)
# One port there, for requests and health.
[[ ${CONTAINER_TYPE:-} != TRITON ]] || flags+=(--allow-grpc=false --allow-metrics=false)
for system in ${SYSTEMS:-}; do
  flags+=(--load-model="$system")
done

# ONNX Runtime 1.29 and later report usage by default.
export ORT_DISABLE_TELEMETRY=1
# Backends read labels and tokenizers of all languages, whatever the locale.
export PYTHONUTF8=1
# Model repositories and backends are read-only in containers.
export PYTHONDONTWRITEBYTECODE=1

# Brings back a model whose Python process died, which Triton by itself does not.
python3 "$(dirname "$(readlink -f "$0")")/revive.py" &

pin=()
[[ -z ${TRITON_CPUS:-} ]] || pin=(taskset -c "$TRITON_CPUS")
exec "${pin[@]}" "$home/bin/tritonserver" "${flags[@]}"
