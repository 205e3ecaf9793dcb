#!/usr/bin/env bash
# linked.sh FOLDER: prints the paths of the libraries that the files in FOLDER link to, and on stderr the names of
# missing ones. It skips the libraries of NVIDIA's driver, which the host provides.
set -euo pipefail

# ldd fails on a file that is neither a library nor a program.
{ find "$1" -type f '(' -name '*.so*' -o -perm /111 ')' -exec ldd '{}' + 2>/dev/null || true; } |
  awk '
    $1 ~ /^lib(cuda|cudadebugger|nvcuvid|nvidia-[a-z-]+|nvoptix)\.so/ { next }
    $2 == "=>" && $3 ~ /^\// { print $3 }
    $2 == "=>" && $3 == "not" { print $1 >"/dev/stderr" }' |
  sort -u
