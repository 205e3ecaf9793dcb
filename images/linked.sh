#!/usr/bin/env bash
# linked.sh FOLDER: the libraries that what is in FOLDER links to: their paths; on stderr the names of those that are
# nowhere. The driver's are the host's business, and come with its GPU.
set -euo pipefail

# Of what is neither a library nor a program, ldd says so and fails.
{ find "$1" -type f '(' -name '*.so*' -o -perm /111 ')' -exec ldd '{}' + 2>/dev/null || true; } |
  awk '
    $1 ~ /^lib(cuda|cudadebugger|nvcuvid|nvidia-[a-z-]+|nvoptix)\.so/ { next }
    $2 == "=>" && $3 ~ /^\// { print $3 }
    $2 == "=>" && $3 == "not" { print $1 >"/dev/stderr" }' |
  sort -u
