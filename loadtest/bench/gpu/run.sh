#!/usr/bin/env bash
# The kit for a bare machine with a GPU and without a network: docs/accelerators.md. `run.sh pack` runs here, the
# other steps there, in a copy of this checkout. Each step can be repeated: it goes on where the last one ended.
set -euo pipefail
cd "$(dirname "$0")/../../.."

# `pack` writes parts here, which travel one by one.
parts=${GPU_KIT_PARTS:-.local/gpu-kit}
# The machine keeps this folder between steps.
kit=${GPU_KIT:-/tmp/gpu-kit}
python=$kit/venv/bin/python
# This Python of the machine has a PyTorch with CUDA.
bare=${BARE_PYTHON:-python3}
bare_version=${BARE_VERSION:-3.12}
part_mib=${PART_MIB:-52}
limit_s=${LIMIT_S:-560}
# The machine has these, for its own CUDA, or in versions that do not matter.
there='torch|triton|nvidia-[^p].*|cuda-.*|onnx|onnxruntime|pandas|ml-dtypes|sympy|networkx|fonttools|hf-xet'
# No step runs these.
unused='openvino.*|nncf|av|xgrammar|gguf|compressed-tensors|soundfile|soxr|jsonschema.*'

usage() {
  cat <<END
here:   loadtest/bench/gpu/run.sh pack [package==version ...]   e.g. onnxruntime-gpu==1.31.1
there:  loadtest/bench/gpu/run.sh receive                       once for each part
        loadtest/bench/gpu/run.sh install
        loadtest/bench/gpu/run.sh machine | rates | served | loadtest | parity [float16] | generation | report
END
}

pack() {
  local wheels=$parts/wheels platform=()
  rm -rf "$parts" && mkdir -p "$wheels"
  for glibc in 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do
    platform+=(--platform "manylinux_${glibc}_x86_64")
  done
  scripts/make/uv.sh .venv export --quiet --frozen --no-header --no-annotate --no-hashes --no-default-groups \
    --group stack --python "$bare_version" | sed 's/ ;.*//' | grep -Ev "^($there|$unused)==" >"$parts/requirements"
  .venv/bin/python -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
    --python-version "$bare_version" --implementation cp "${platform[@]}" --platform manylinux2014_x86_64 \
    --platform manylinux1_x86_64 --dest "$wheels" --requirement "$parts/requirements" "$@"
  # The stub of another Python needs it: a fifth of the wheel.
  .venv/bin/python - "$wheels" "nvidia_pytriton.libs/libpython3-" <<'END'
import sys, zipfile
from pathlib import Path
(wheel,) = Path(sys.argv[1]).glob("nvidia_pytriton-*.whl")
whole = wheel.rename(wheel.with_suffix(".whole"))
with zipfile.ZipFile(whole) as source, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as target:
    for file in source.infolist():
        if not file.filename.startswith(sys.argv[2]):
            target.writestr(file, source.read(file))
whole.unlink()
END
  # Triton's Python processes link to it, and distributions have it in a package of its own.
  [[ -z ${LIBPYTHON:-} ]] || cp -L "$LIBPYTHON" "$wheels/"
  tar -C "$parts" -cf - wheels | split --bytes="${part_mib}M" --numeric-suffixes - "$parts/part-"
  rm -rf "$wheels"
  (cd "$parts" && sha256sum part-* >checksums)
  du -m "$parts"/part-*
}

receive() {
  mkdir -p "$kit/parts"
  ! compgen -G "$parts/part-*" >/dev/null || mv "$parts"/part-* "$kit/parts/"
  [[ ! -e $parts/checksums ]] || cp "$parts/checksums" "$kit/parts/"
  ls -l "$kit/parts"
}

install() {
  (cd "$kit/parts" && sha256sum --check --quiet checksums)
  cat "$kit"/parts/part-* | tar -C "$kit" -xf -
  rm -rf "$kit/venv"
  "$bare" -m venv --without-pip "$kit/venv"
  local packages
  packages=$("$python" -c 'import site; print(site.getsitepackages()[0])')
  # The machine's own packages come after the carried ones.
  "$bare" -c 'import site, sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    >"$packages/machine.pth"
  "$bare" -m pip --disable-pip-version-check --python "$python" install --quiet --no-index --no-deps "$kit"/wheels/*.whl
  machine
}

# Triton's Python processes look for their libraries here.
export LD_LIBRARY_PATH=$kit/wheels${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LOCAL_STATE=$kit/state TRITON_SETTINGS_NAMES=LOCAL_STATE
export PYTHONUNBUFFERED=1

machine() {
  mkdir -p "$kit/results"
  {
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no GPU"
    "$python" - "$LOCAL_STATE" <<'END'
import importlib.metadata, os, platform, sys, torch
from pathlib import Path
from scripts.stack.local.programs import libpython
print(platform.python_version(), f"{len(os.sched_getaffinity(0))} cores, CUDA {torch.version.cuda}")
for name in "torch transformers sentence-transformers numpy onnxruntime onnxruntime-gpu vllm infinity-emb".split():
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "is not installed")
try:
    print("libpython", libpython(Path(sys.argv[1])) or "of the system, or carried")
except Exception as error:
    print(f"Triton cannot start its Python processes: {error}")
END
  } 2>&1 | tee "$kit/results/machine.txt"
}

# logged NAME COMMAND...: runs it within the limit, and keeps what it prints.
logged() {
  local name=$1
  shift
  mkdir -p "$kit/results"
  timeout --signal INT --kill-after 20 "$limit_s" "$@" 2>&1 | tee "$kit/results/$name.txt"
}

rates() { logged rates "$python" -m loadtest.bench.gpu.rates "$kit/results/rates"; }
served() { logged served "$python" -m loadtest.bench.gpu.steps served "$kit/results"; }
loadtest() { logged loadtest "$python" -m loadtest.bench.gpu.steps loadtest "$kit/results"; }
generation() { logged generation "$python" -m loadtest.bench.gpu.steps generation "$kit/results"; }
parity() {
  local dtype=${1:-bfloat16}
  shift || true
  logged "parity-$dtype" "$python" -m loadtest.bench.gpu.half_precision "$kit/results/parity" "$dtype" --seconds "$limit_s" "$@"
}

# Ends the stacks of a step that was interrupted, which would keep the GPU's memory.
end_stacks() {
  local file
  while read -r file; do
    kill "$(cut -d / -f 3 <<<"$file")" || true
  done < <(grep -lszE "^STATE=$kit/" /proc/[0-9]*/environ)
}

# Puts all results so far into $OUT: a page to read, and the files.
report() {
  local out=${OUT:-$kit/out} file
  mkdir -p "$out"
  for file in machine rates served loadtest parity-float16 parity-bfloat16 generation; do
    [[ ! -e $kit/results/$file.txt ]] ||
      printf '## %s\n\n~~~\n%s\n~~~\n\n' "$file" "$(tail -n 120 "$kit/results/$file.txt")"
  done >"$out/summary.md"
  tar -C "$kit/results" --exclude 'state*' -czf "$out/results.tar.gz" .
}

step=${1:-}
case $step in
pack | receive | install | machine | report) "$@" ;;
rates | served | loadtest | parity | generation)
  trap 'end_stacks; report' EXIT
  "$@"
  ;;
*) usage && [[ $step == help ]] ;;
esac
