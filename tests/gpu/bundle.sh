#!/usr/bin/env bash
# Usage: bundle.sh FOLDER
#
# Everything that the tests and benches on a GPU need of this repository, for a machine without it: the daemon
# (built before, from ENGRAM_BIN or target/release), the shim as an installed package, and the scripts. There:
#   tar xJf FOLDER/engram.tar.xz; export ENGRAM_BIN=$PWD/engram/engram; python3 engram/tests/gpu/test_ipc.py
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p -- "$1"
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
mkdir -p "$work/engram/tests" "$work/engram/benches" "$work/engram/python-shim"
strip -o "$work/engram/engram" "${ENGRAM_BIN:-$root/target/release/engram}"
cp -r "$root/tests/gpu" "$work/engram/tests/gpu"
cp -r "$root/benches/gpu" "$work/engram/benches/gpu"
cp -r "$root/python-shim/src" "$work/engram/python-shim/src"
find "$work" -name __pycache__ -prune -exec rm -rf {} +
info=$work/engram/python-shim/src/engram_sglang-0.dist-info
rm -rf "$work"/engram/python-shim/src/*.egg-info
mkdir "$info"
printf 'Metadata-Version: 2.1\nName: engram-sglang\nVersion: 0\n' >"$info/METADATA"
printf '[sglang.srt.plugins]\nengram = engram_sglang.plugin:load\n' >"$info/entry_points.txt"
tar -C "$work" -cJf "$1/engram.tar.xz" engram
