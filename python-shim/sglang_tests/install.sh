#!/usr/bin/env bash
# Usage: install.sh RELEASE FOLDER
#
# FOLDER/sglang-RELEASE: a Python environment with exactly what lock/sglang-RELEASE.txt pins, and the shim.
# About a minute and 3 GB. Without ENGRAM_FULL_TORCH=1, libraries of the GPU (2.7 GB more) are replaced by
# stubs: enough to import torch and compute on the CPU. Needs Python 3.11, a C compiler and binutils.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
release=$1
mkdir -p -- "$2"
target=$(cd -- "$2" && pwd)/sglang-$release
lock=$here/lock/sglang-$release.txt
python=${SGLANG_PYTHON:-python3.11}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

stamp=$({
    "$python" -VV
    echo "$python ${ENGRAM_FULL_TORCH:-0} $here"
    cat -- "$lock" "$here/mkstub.py" "$here/../pyproject.toml"
} | cksum)
[[ -f $target/stamp && $(<"$target/stamp") == "$stamp" ]] && exit 0

rm -rf -- "$target"
"$python" -m venv "$target"
pip=("$target/bin/python" -m pip install --quiet --no-cache-dir)
if [[ ${ENGRAM_FULL_TORCH:-0} == 1 ]]; then
    # The lock does not hold what only the GPU needs.
    "${pip[@]}" "$(grep '^torch==' "$lock")"
fi
"${pip[@]}" --no-deps -r "$lock"
if [[ ${ENGRAM_FULL_TORCH:-0} != 1 ]]; then
    "$target/bin/python" "$here/mkstub.py" "$target/lib/python3.11/site-packages" >/dev/null
fi
"${pip[@]}" --no-deps --editable "$here/.."
"$target/bin/python" -c 'import torch, sglang, engram_sglang'
echo "$stamp" >"$target/stamp"
