#!/usr/bin/env bash
# Usage: install.sh RELEASE FOLDER
#
# FOLDER/sglang-RELEASE: a Python environment with exactly what lock/sglang-RELEASE.txt pins, and the shim.
# Two minutes and 2.4 GB, nothing if it is there already. Without ENGRAM_FULL_TORCH=1, libraries of the GPU
# (2.7 GB more) are replaced by stubs: enough to import torch and compute on the CPU. The lock holds what
# SGLang imports here, which is less than what it asks for.
#
# Needs x86-64 with glibc 2.34 or newer, Python 3.11, 3.12 or 3.13 (those that SGLang has wheels for; set
# SGLANG_PYTHON to choose), a C compiler and binutils, and a package index.
set -euo pipefail

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

[[ $# -eq 2 ]] || fail "usage: install.sh RELEASE FOLDER"
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
release=$1
mkdir -p -- "$2"
target=$(cd -- "$2" && pwd)/sglang-$release
lock=$here/lock/sglang-$release.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
[[ -f $lock ]] || fail "there is no lock of SGLang $release"

# The first interpreter that is usable: its name is nothing to go by.
python=
for candidate in ${SGLANG_PYTHON:-${PYTHON:-} python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
        python=$(command -v -- "$candidate")
        break
    fi
done
[[ -n $python ]] || fail "no Python 3.11, 3.12 or 3.13 with venv found, and SGLang $release has wheels for no other" \
    "(on Debian: python3-venv; or set SGLANG_PYTHON)"
for tool in "${CC:-cc}" objdump nm; do
    command -v -- "$tool" >/dev/null || fail "$tool is missing (on Debian: gcc and binutils)"
done

stamp=$({
    "$python" -VV
    echo "$python ${ENGRAM_FULL_TORCH:-0} $here"
    cat -- "$lock" "$here/install.sh" "$here/mkstub.py" "$here/../pyproject.toml"
} | cksum)
[[ -f $target/stamp && $(<"$target/stamp") == "$stamp" ]] && exit 0

rm -rf -- "$target"
"$python" -m venv "$target"
python=$target/bin/python
# Code is compiled when it is first imported, below: most of it never is.
pip=("$python" -m pip install --quiet --no-cache-dir --no-compile --only-binary=:all:)
if [[ ${ENGRAM_FULL_TORCH:-0} == 1 ]]; then
    # The lock does not hold what only the GPU needs.
    "${pip[@]}" "$(grep '^torch==' "$lock")"
fi
"${pip[@]}" --no-deps -r "$lock"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [[ ${ENGRAM_FULL_TORCH:-0} != 1 ]]; then
    "$python" "$here/mkstub.py" "$packages" >/dev/null
    # What is only for compiling: for a GPU, or against torch.
    rm -rf -- "$packages"/torch/{include,test} "$packages"/triton/backends/*/bin
fi
"$python" -m pip install --quiet --no-deps --no-build-isolation --editable "$here/.."
env -u PYTHONDONTWRITEBYTECODE "$python" -W ignore -c '
import pytest, torch, grpc
import engram_sglang._pb.engram.v1.engram_pb2_grpc
import sglang.srt.managers.scheduler, sglang.srt.plugins' >/dev/null
echo "$stamp" >"$target/stamp"
