#!/usr/bin/env bash
# Installs Debian's chromium, which the browser tests drive, unless one is there already.
set -euo pipefail
if command -v chromium >/dev/null; then exit 0; fi
sudo=""
if [ "$(id -u)" -ne 0 ]; then sudo="sudo"; fi
if ! command -v apt-get >/dev/null; then
  echo "The browser tests need chromium on the PATH; install it with your package manager." >&2
  exit 1
fi
$sudo apt-get update -qq
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core fonts-noto-color-emoji >/dev/null
