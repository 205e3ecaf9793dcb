#!/usr/bin/env bash
# gather.sh TARGET MIN "backend ...": copies a Triton with only these backends out of NVIDIA's whole image into TARGET:
# the server, the checksum agent, and the libraries they link to that MIN, the root of the smaller image, lacks.
set -euo pipefail
target=$1 min=$2
read -ra backends <<<"$3"
home=/opt/tritonserver
mkdir -p "$target$home"/{backends,repoagents,caches}

for part in bin lib LICENSE TRITON_VERSION caches/local repoagents/checksum backends/python; do
  [[ ! -e $home/$part ]] || cp -a "$home/$part" "$target$home/$part"
done
for backend in "${backends[@]}"; do
  # Our backends, then NVIDIA's own, such as onnxruntime.
  for folder in "/backends/$backend" "$home/backends/$backend"; do
    [[ ! -d $folder ]] || { cp -a "$folder" "$target$home/backends/" && continue 2; }
  done
  [[ $backend == python ]] || { echo "this image has no backend $backend" >&2 && exit 1; }
done

# /nowhere lists the libraries that NVIDIA's whole image lacks, too.
linked.sh "$target$home" 2>"$target/nowhere" |
  while read -r library; do
    # /lib is a link to /usr/lib, here and in MIN.
    folder=$(realpath "$(dirname "$library")")
    library=$folder/$(basename "$library")
    # Libraries beside the server and the backends were copied with them.
    [[ $folder != "$home"* && $folder != "$target$home"* && ! -e $min$library && ! -L $min$library ]] || continue
    mkdir -p "$target$folder"
    cp -aL "$library" "$target$folder/"
  done
