#!/usr/bin/env bash
# Pulls the images of versions.env. For those that cannot be pulled here it builds STAND-INS from Debian packages, under
# the same names. The label of a stand-in says so; an image without that label is a real one and is never touched. A
# second run rebuilds what changed in stand-ins/.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/docker/common.sh
. "$here/common.sh"
# shellcheck source=/dev/null
. "${VERSIONS:-$here/../../versions.env}"
export DOCKER_BUILDKIT=1

label=org.opencontainers.image.description
made_by="made by tests/docker/base-images.sh"

exists() { docker image inspect "$1" >/dev/null 2>&1; }
is_real() { exists "$1" && [[ $(docker image inspect -f "{{json .Config.Labels}}" "$1") != *"$made_by"* ]]; }

# The registry, if it answers, has the real image.
pull() { exists "$1" || timeout 300 docker pull --quiet "$1" >/dev/null 2>&1 || true; }

# Trim debootstrap's smallest variant as the official slim image does: no documentation, and these settings for apt.
trim_debian() {
  local root=$1
  cat >"$root/etc/dpkg/dpkg.cfg.d/docker" <<-'SETTINGS'
		force-unsafe-io
		path-exclude /usr/share/doc/*
		path-include /usr/share/doc/*/copyright
		path-exclude /usr/share/info/*
		path-exclude /usr/share/locale/*
		path-exclude /usr/share/man/*
	SETTINGS
  cat >"$root/etc/apt/apt.conf.d/docker" <<-'SETTINGS'
		Acquire::Languages "none";
		APT::Keep-Downloaded-Packages "false";
		Dir::Cache::pkgcache "";
		Dir::Cache::srcpkgcache "";
	SETTINGS
  # Packages must not start their services in a build.
  printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
  chmod +x "$root/usr/sbin/policy-rc.d"
  find "$root/usr/share/doc" -type f ! -name copyright -delete
  rm -rf "$root"/usr/share/{info,locale,man}/* "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin \
    "$root"/var/cache/apt/archives/*.deb "$root"/var/log/{apt,*.log}
  # Behind a company's proxy, builds reach a package index only with the company's root certificates.
  if compgen -G '/usr/local/share/ca-certificates/*.crt' >/dev/null; then
    cp /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/"
    quietly chroot "$root" update-ca-certificates
  fi
}

debian() {
  exists "$DEBIAN_IMAGE" && return
  # The images need Python 3.11, which Debian 12 has.
  [[ $DEBIAN_IMAGE == *:12* ]] || die "$DEBIAN_IMAGE cannot be pulled, and its stand-in is always Debian 12."
  can_install || die "$DEBIAN_IMAGE is missing, and only root on a Debian with apt can make its stand-in."
  command -v debootstrap >/dev/null || install_packages debootstrap || die "debootstrap could not be installed."

  work=$(mktemp -d)
  # An interrupted debootstrap leaves /proc mounted inside.
  trap 'umount "$work/proc" 2>/dev/null || true; rm -rf --one-file-system "$work"' EXIT
  chmod 755 "$work" # the image's /
  quietly debootstrap --variant=minbase --include=ca-certificates bookworm "$work" "$(debian_mirror)" ||
    die "debootstrap failed; its message is above."
  trim_debian "$work"
  tar -C "$work" --numeric-owner -c . |
    docker import --change "LABEL $label=\"stand-in for Debian slim, $made_by\"" --change 'CMD ["bash"]' \
      - "$DEBIAN_IMAGE" >/dev/null
}

stand_in() { # name, image, real software
  is_real "$2" && return
  docker build --quiet --tag "$2" --file "$here/stand-ins/$1/Dockerfile" --build-arg "DEBIAN_IMAGE=$DEBIAN_IMAGE" \
    --build-arg "TRITON_IMAGE=$TRITON_IMAGE" --label "$label=stand-in for $3, $made_by" "$here/stand-ins/$1" >/dev/null ||
    die "The stand-in for $2 could not be built."
}

docker info >/dev/null 2>&1 || die "No Docker engine answers; tests/docker/engine.sh starts one."
# NVIDIA's images are not pulled: 15 GB, of no use without a GPU.
for image in "$DEBIAN_IMAGE" "$PROMETHEUS_IMAGE" "$GRAFANA_IMAGE" "$JAEGER_IMAGE"; do pull "$image" & done
wait
debian
stand_in prometheus "$PROMETHEUS_IMAGE" "Prometheus (Debian's package, an older release)" &
stand_in grafana "$GRAFANA_IMAGE" "Grafana (answers health and shows what is provisioned, draws nothing)" &
stand_in jaeger "$JAEGER_IMAGE" "Jaeger (receives traces and shows their ids, draws nothing)" &
stand_in triton-min "$TRITON_MIN_IMAGE" "the image that NVIDIA's Triton is built on" &
stand_in triton "$TRITON_IMAGE" "NVIDIA's Triton (its paths only, it serves nothing)"
stand_in triton-vllm "$TRITON_VLLM_IMAGE" "NVIDIA's Triton with vLLM (its paths only, it serves nothing)"
for build in $(jobs -p); do wait "$build"; done
