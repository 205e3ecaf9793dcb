#!/usr/bin/env bash
# Starts Triton in every runtime. Only this file turns the settings of .env.example into tritonserver's flags.
set -euo pipefail
# A core dump would contain requests and the key.
ulimit -c 0

home=${TRITON_HOME:-/opt/tritonserver}
# Endpoints that load code, map memory or change the server need the key. TRITON_SHARED_MEMORY opens one of them, but
# not in Oracle Cloud, where every client is remote.
restricted=model-repository,trace,logging
[[ ${TRITON_SHARED_MEMORY:-0} == 1 && ${CONTAINER_TYPE:-} != TRITON ]] || restricted+=,shared-memory
# Oracle Cloud sets CONTAINER_TYPE. No client there needs the restricted endpoints, so a random key closes them.
if [[ ${CONTAINER_TYPE:-} == TRITON ]]; then
  export TRITON_ADMIN_KEY="${TRITON_ADMIN_KEY:-$(python3 -c 'import secrets; print(secrets.token_urlsafe())')}"
fi
# The name of the HTTP header and of the gRPC metadata key, and its value.
key="triton-admin-key=${TRITON_ADMIN_KEY:?is empty: run make up, which makes one}"

export BIND_ADDRESS=${BIND_ADDRESS:-127.0.0.1}

# Each Python process starts with 64 MiB of shared memory (TRITON-FAULTS.md#small-shared-memory), or with a sixteenth
# of a smaller /dev/shm: Docker's default is 64 MB in all. Triton's minimum is 4 MiB. Some df lack --output.
shm=${TRITON_SHM_BYTES:-}
if [[ -z $shm ]]; then
  available=$({ df --output=size -B1 /dev/shm 2>/dev/null || true; } | tail -n 1)
  [[ $available =~ ^\ *[1-9][0-9]*$ ]] || available=$((16 * 64 << 20))
  shm=$((available / 16 < 4 << 20 ? 4 << 20 : available / 16 > 64 << 20 ? 64 << 20 : available / 16))
fi

flags=(
  --model-repository="${MODEL_REPOSITORY:-/models}"
  --backend-directory="$home/backends"
  --cache-directory="$home/caches"
  --model-control-mode=explicit
  # Triton prefers a model's configs/<profile>.pbtxt to its config.pbtxt.
  --model-config-name="${PROFILE:-cpu}"
  # If one model does not load, serve the others; readiness and `make status` report it.
  --exit-on-error=false
  # The time for requests in flight. After a failed reload Triton waits for all of it; its default is 30.
  --exit-timeout-secs=10
  --http-address="$BIND_ADDRESS" --http-port="${TRITON_HTTP_PORT:-8000}"
  --grpc-address="$BIND_ADDRESS" --grpc-port="${TRITON_GRPC_PORT:-8001}"
  --metrics-address="$BIND_ADDRESS" --metrics-port="${TRITON_METRICS_PORT:-8002}"
  # TRITON-FAULTS.md#front-ends-that-ignore-the-key
  --allow-sagemaker=false --allow-vertex-ai=false
  --http-restricted-api="$restricted:$key"
  --grpc-restricted-protocol="$restricted:$key"
  --backend-config="python,shm-default-byte-size=$shm"
  --log-verbose="${TRITON_LOG_VERBOSE:-0}"
)
# TRITON-FAULTS.md#errors-without-a-gpu. A filter of the log would lose the last lines of a crash, because a container
# ends with its first process.
if [[ ${PROFILE:-cpu} != cuda ]]; then
  # Only PROFILE=cuda has the packages for instances on GPUs.
  export CUDA_VISIBLE_DEVICES=
  flags+=(--allow-gpu-metrics=false)
  echo "serve.sh: Without a GPU, Triton logs two errors that are harmless: 'CudaDriverHelper has not been initialized'" \
    "and, for each ensemble, 'unable to create stream'. Ignore them."
fi
if [[ ${TRACE:-0} == 1 ]]; then
  # The backends send their spans there too. No proxy reaches a receiver on this machine, or in Docker's network.
  export TRACE_URL=${TRACE_URL:-http://127.0.0.1:${TRACE_PORT:-4318}/v1/traces}
  no_proxy=${no_proxy:-${NO_PROXY:-}}
  export no_proxy=127.0.0.1,traces${no_proxy:+,$no_proxy}
  flags+=(
    --trace-config=mode=opentelemetry --trace-config=level=TIMESTAMPS --trace-config=count=-1
    --trace-config=rate="${TRACE_RATE:-1}"
    --trace-config="opentelemetry,url=$TRACE_URL"
    --trace-config="opentelemetry,resource=service.name=triton"
    # Milliseconds. The queue has room for 2,048 spans, and with the default of 5 s some are lost under load.
    --trace-config="opentelemetry,bsp_schedule_delay=500"
  )
fi
# Oracle Cloud allows one port, for requests and health.
[[ ${CONTAINER_TYPE:-} != TRITON ]] || flags+=(--allow-grpc=false --allow-metrics=false)
# `make` keeps the systems in a file, and the watchdog loads them one after the other, so that the first answers while the
# others load. Elsewhere a server that is ready has loaded all of SYSTEMS.
if [[ -z ${SYSTEMS_FILE:-} ]]; then
  for system in ${SYSTEMS:-}; do
    flags+=(--load-model="$system")
    # While Triton starts, a system cannot load the model that generates for it.
    config=${MODEL_REPOSITORY:-/models}/$system/configs/${PROFILE:-cpu}.pbtxt
    [[ -f $config ]] || config=${MODEL_REPOSITORY:-/models}/$system/config.pbtxt
    engine=$({ tr -d '\n' <"$config"; } 2>/dev/null | sed -n 's/.*"engine_model"[^"]*"\([^"]*\)".*/\1/p' || true)
    [[ -z $engine ]] || flags+=(--load-model="$engine")
  done
fi

# TRITON-FAULTS.md#front-ends-that-ignore-the-key
unset "${!AIP_@}"
# ONNX Runtime 1.29 and later report usage by default.
export ORT_DISABLE_TELEMETRY=1
# glibc asks for pages of 2 MB: a CPU cannot keep the addresses of all weights in pages of 4 kB.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1${GLIBC_TUNABLES:+:$GLIBC_TUNABLES}
# Backends read labels and tokenizers of all languages, whatever the locale.
export PYTHONUTF8=1
# Model repositories and backends are read-only in containers.
export PYTHONDONTWRITEBYTECODE=1

# $$ becomes tritonserver's pid, and its start time tells it from a later process with this pid. The watchdog ends without
# an error when tritonserver has ended. The loop also ends with tritonserver if the watchdog cannot run, as after
# `make clean`.
start_time() {
  local fields
  { read -ra fields <"/proc/$$/stat"; } 2>/dev/null && [[ ${fields[2]} != [ZX] ]] && echo "${fields[21]}"
}
started=$(start_time)
until python3 -m serving.watchdog "$$" "$started" || [[ $(start_time) != "$started" ]]; do sleep 1; done &
# The Python processes of models run their code with the server's environment.
export -n TRITON_ADMIN_KEY

pin=()
[[ -z ${TRITON_CPUS:-} ]] || pin=(taskset -c "$TRITON_CPUS")
exec "${pin[@]}" "$home/bin/tritonserver" "${flags[@]}"
