#!/usr/bin/env bash
# Prints the version of this checkout, and the releases that it pins, before any package is installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
pinned() { sed -n "/^name = \"$1\"$/,/^$/s/^version = \"\(.*\)\"/\1/p" uv.lock; }

commit=$(git describe --always --dirty --exclude='*' 2>/dev/null || true)
echo "triton-transformers $(pinned triton-transformers)${commit:+ ($commit)}"
pytriton=$(pinned nvidia-pytriton)
triton=$(sed -n "s/^\"nvidia-pytriton==$pytriton\" = \"\([^\"]*\).*/\1/p" scripts/audit/known.toml)
echo "Triton $triton (nvidia-pytriton $pytriton), or $(sed -n 's/^TRITON_IMAGE=//p' versions.env)"
for package in transformers torch onnxruntime openvino openvino-genai; do echo "$package $(pinned "$package")"; done
echo "$(uname -sm), $(python3 --version 2>&1)"
