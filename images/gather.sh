#!/usr/bin/env bash
# gather.sh TARGET MIN "backend ...": what a Triton with just these backends consists of, out of NVIDIA's whole image into
# TARGET: the server, the checksum agent, and the libraries they link to that MIN, the image it is all for, has not got.
set -euo pipefail
target=$1 min=$2
read -ra backends <<<"$3"
home=/opt/tritonserver
mkdir -p "$target$home"/{backends,repoagents,caches}

for part in bin lib LICENSE TRITON_VERSION caches/local repoagents/checksum backends/python; do
  [[ ! -e $home/$part ]] || cp -a "$home/$part" "$target$home/$part"
done
for backend in shared "${backends[@]}"; do
  # Ours, or NVIDIA's own, such as onnxruntime.
  for place in "/backends/$backend" "$home/backends/$backend"; do
    [[ ! -d $place ]] || { cp -a "$place" "$target$home/backends/" && continue 2; }
  done
  [[ $backend == python ]] || { echo "there is no backend $backend in this image" >&2 && exit 1; }
done

# What not even NVIDIA's whole image has, it does without.
linked.sh "$target$home" 2>"$target/nowhere" |
  while read -r library; do
    # Debian's /lib is a link to /usr/lib, and so is that of MIN.
    folder=$(realpath "$(dirname "$library")")
    library=$folder/$(basename "$library")
    # What lies beside the server and the backends came with them.
    [[ $folder != "$home"* && $folder != "$target$home"* && ! -e $min$library && ! -L $min$library ]] || continue
    mkdir -p "$target$folder"
    cp -aL "$library" "$target$folder/"
  done
