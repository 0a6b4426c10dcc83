#!/usr/bin/env bash
# Installs Debian's chromium, which the browser tests drive, unless one is there already.
set -euo pipefail
if command -v chromium >/dev/null; then exit 0; fi
if ! command -v apt-get >/dev/null; then
  echo "The browser tests need chromium on the PATH; install it with your package manager." >&2
  exit 1
fi
as_root=""
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "The browser tests need chromium; as root, run: apt-get install -y chromium" >&2
    exit 1
  fi
  as_root="sudo"
fi
$as_root apt-get update -qq
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core fonts-noto-color-emoji >/dev/null
