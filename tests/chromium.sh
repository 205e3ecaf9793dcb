#!/usr/bin/env bash
# Makes sure that Chromium and its driver are installed, for the tests of the gateway's page: does nothing if they are,
# else installs them on Debian, as root and with CI=true.
set -euo pipefail
# shellcheck source=tests/docker/common.sh
. "$(dirname "$0")/docker/common.sh"

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit; fi
[[ ${CI:-} == true ]] || die "Chromium or its driver is missing. Install the packages chromium and chromium-driver, or \
run this with CI=true."
can_install || die "Chromium or its driver is missing, and only root on Debian can install them here."
install_packages chromium chromium-driver || die "chromium and chromium-driver could not be installed; apt's message is above."
