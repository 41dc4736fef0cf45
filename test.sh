#!/usr/bin/env bash
# The one check of this repository. See --help.
set -uo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
case $target in /*) ;; *) target=$PWD/$target ;; esac
limit_s=3600
all_stages=(tools fmt deny venvs clippy build doc rust python contract sglang bench)

usage() {
    cat <<EOF
Usage: ./test.sh [STAGE...]

Checks everything, or only the stages named, in the order below. Needs Rust, Python 3.11 or newer
and a C compiler; whatever else it needs it installs, pinned, below target/.

  tools    cargo-deny and cargo-nextest, where the pinned version is not on PATH
  fmt      rustfmt
  deny     licences, sources and duplicates of the dependencies
  venvs    Python environments: oldest and newest supported libraries, code generator
  clippy   lints, warnings denied, with all features and with none
  build    daemon, tests and benchmarks, in the one profile that all stages share
  doc      documentation examples
  rust     all Rust tests
  python   all Python tests, once for each environment
  contract the running daemon against its own OpenAPI document
  sglang   the shim in real SGLang on the CPU, once for each release: x86-64 with glibc 2.34 or newer,
           Python 3.11, 3.12 or 3.13; takes 5 GB below target/venv and, the first time, 3 minutes
  bench    the benchmarks compile

A failed stage does not keep later ones from running. The exit code is 0 only if all passed within
60 minutes; a table at the end says how long each took.

The Python tests find the binary in ENGRAM_BIN and an interpreter with the code generator, where
there is one, in ENGRAM_GENERATOR.

Variables: PYTHON (interpreter), CARGO_TARGET_DIR, ENGRAM_TOOLS_FROM_SOURCE=1 (no binary wheels),
SGLANG_PYTHON (interpreter for the stage sglang).
EOF
}

wanted=()
for arg in "$@"; do
    case " ${all_stages[*]} " in
        *" $arg "*) wanted+=("$arg") ;;
        *)
            [[ $arg == -h || $arg == --help ]] && { usage; exit 0; }
            printf 'test.sh: no such stage: %s\n\n' "$arg" >&2
            usage >&2
            exit 64
            ;;
    esac
done
[[ ${#wanted[@]} -eq 0 ]] && wanted=("${all_stages[@]}")

# The limit holds for a hanging stage too: the script runs itself under it. TERM reaches the whole
# process group, so the stage ends and the trap below still prints the table.
if [[ -z ${ENGRAM_TEST_STARTED:-} ]] && command -v timeout >/dev/null; then
    export ENGRAM_TEST_STARTED=1
    exec timeout --kill-after=30 "$limit_s" "$root/test.sh" "${wanted[@]}" </dev/null
fi

unset ENGRAM_TEST_STARTED
cd -- "$root" || exit 1
export PATH=$target/tools/bin:$PATH
export CARGO_TERM_PROGRESS_WHEN=never PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
export PYTHONDONTWRITEBYTECODE=1
cargo_flags=(--release --locked --all-features)
sglang_releases=(0.5.17 0.5.23)

# --- Tools ------------------------------------------------------------------------------------

# Prints the interpreter to use: $PYTHON, or the first on PATH that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v -- "$candidate"
            return
        fi
    done
    echo "test.sh: no Python 3.11 or newer found (set PYTHON)" >&2
    return 1
}

# pinned_version TOOL: the version of it in .config/tools.txt.
pinned_version() {
    sed -n "s/^astral-dev-toolchain-$1==\([0-9.]*\).*/\1/p" .config/tools.txt
}

# have TOOL VERSION: is exactly this version of a cargo subcommand on PATH?
have() {
    [[ $("$1" --version 2>/dev/null | head -n 1 | cut -d ' ' -f 2) == "$2" ]]
}

# venv NAME REQUIREMENTS [PIP_FLAG...]: target/venv/NAME holds exactly what the file pins.
venv() {
    local dir=$target/venv/$1 requirements=$2 python stamp
    shift 2
    python=$(find_python) || return
    stamp=$({
        "$python" -VV
        echo "$python" "$@"
        cat -- "$requirements" python-shim/requirements-test.txt
    } | cksum)
    [[ -f $dir/stamp && $(<"$dir/stamp") == "$stamp" ]] && return
    rm -rf -- "$dir"
    if ! "$python" -m venv "$dir"; then
        echo "test.sh: $python cannot make virtual environments (on Debian: python3-venv)" >&2
        return 1
    fi
    "$dir/bin/python" -m pip install --quiet --only-binary=:all: "$@" -r "$requirements" || return
    echo "$stamp" >"$dir/stamp"
}

stage_tools() {
    local tool version missing=()
    for tool in cargo-deny cargo-nextest; do
        have "$tool" "$(pinned_version "$tool")" || missing+=("$tool")
    done
    [[ ${#missing[@]} -eq 0 ]] && return
    mkdir -p -- "$target/tools/bin"
    # From wheels in seconds; where none fits this machine, from source in minutes.
    if [[ -z ${ENGRAM_TOOLS_FROM_SOURCE:-} ]] &&
        venv tools .config/tools.txt --require-hashes --no-deps; then
        for tool in "${missing[@]}"; do
            ln -sf -- "$target/venv/tools/bin/$tool" "$target/tools/bin/$tool"
        done
    fi
    for tool in "${missing[@]}"; do
        version=$(pinned_version "$tool")
        have "$tool" "$version" && continue
        rm -f -- "$target/tools/bin/$tool"
        # A tool that runs for a second is not worth an optimised build.
        CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_OPT_LEVEL=0 \
            CARGO_PROFILE_RELEASE_DEBUG=0 CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
            CARGO_TARGET_DIR=$target/tools/build \
            cargo install --quiet --root "$target/tools" --locked --no-default-features \
            $([[ $tool == cargo-nextest ]] && echo --features=default-no-update) \
            --version "$version" "$tool" || return
    done
    rm -rf -- "$target/tools/build"
}

# --- Stages -----------------------------------------------------------------------------------

stage_fmt() {
    cargo fmt --check
}

stage_deny() {
    cargo deny --locked check bans licenses sources
}

stage_venvs() {
    local name dir stamp python
    python=$(find_python) || return
    # The generator is old on purpose, and has no wheels for the newest Python.
    if "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 14))'; then
        venv gen python-shim/requirements-gen.txt || return
    else
        echo "no code generator for $("$python" -V): the committed code is not compared with it"
        rm -rf -- "$target/venv/gen"
    fi
    for name in old new; do
        venv "$name" "python-shim/requirements-$name.txt" || return
        # The package itself: its code stays where it is, its metadata is of this pyproject.toml.
        dir=$target/venv/$name
        stamp=$(cat python-shim/pyproject.toml python-shim/src/engram_sglang/__init__.py | cksum)
        [[ -f $dir/package && $(<"$dir/package") == "$stamp" ]] && continue
        "$dir/bin/python" -m pip install --quiet --no-deps --no-build-isolation \
            -e python-shim || return
        echo "$stamp" >"$dir/package"
    done
}

stage_clippy() {
    cargo clippy "${cargo_flags[@]}" --all-targets -- -D warnings &&
        cargo clippy --release --locked -- -D warnings
}

stage_build() {
    # All targets at once: features of test-only dependencies are then the same everywhere, and the
    # stages below rebuild nothing.
    cargo build "${cargo_flags[@]}" --all-targets
}

stage_doc() {
    cargo test "${cargo_flags[@]}" --doc
}

stage_rust() {
    cargo nextest run "${cargo_flags[@]}"
}

stage_python() {
    stage_build && stage_venvs || return
    local name failed=0 generator=$target/venv/gen/bin/python
    [[ -x $generator ]] || generator=
    for name in old new; do
        printf '\n--- Python tests, %s libraries\n' "$name"
        ENGRAM_BIN=$target/release/engram ENGRAM_RUNTIME=$name \
            ENGRAM_GENERATOR=$generator \
            "$target/venv/$name/bin/python" -m pytest -c python-shim/pyproject.toml \
            python-shim/tests deploy/tests || failed=1
    done
    return "$failed"
}

stage_contract() {
    stage_build && venv contract tests/contract/requirements.txt || return
    ENGRAM_BIN=$target/release/engram "$target/venv/contract/bin/python" -m pytest \
        -c tests/contract/pytest.ini tests/contract
}

stage_sglang() {
    stage_build || return
    local release failed=0 pids=()
    for release in "${sglang_releases[@]}"; do
        bash python-shim/sglang_tests/install.sh "$release" "$target/venv" &
        pids+=($!)
    done
    for release in "${pids[@]}"; do
        wait "$release" || failed=1
    done
    [[ $failed -eq 0 ]] || return 1
    for release in "${sglang_releases[@]}"; do
        printf '\n--- SGLang %s\n' "$release"
        ENGRAM_BIN=$target/release/engram \
            "$target/venv/sglang-$release/bin/python" -m pytest python-shim/sglang_tests || failed=1
    done
    return "$failed"
}

stage_bench() {
    cargo bench --locked --all-features --no-run
}

# --- Run --------------------------------------------------------------------------------------

table=()
failures=0
current=

report() {
    printf '\n%-10s %8s  %s\n' stage seconds result
    [[ ${#table[@]} -gt 0 ]] && printf '%s\n' "${table[@]}"
    printf '%-10s %8d\n' total "$SECONDS"
}

# shellcheck disable=SC2317  # called by the trap
interrupted() {
    printf '\ntest.sh: ended in stage %s after %d s (the limit is %d s)\n' \
        "$current" "$SECONDS" "$limit_s" >&2
    table+=("$(printf '%-10s %8s  %s' "$current" - 'not finished')")
    report
    exit 1
}
trap interrupted INT TERM

for current in "${all_stages[@]}"; do
    case " ${wanted[*]} " in *" $current "*) ;; *) continue ;; esac
    printf '\n=== %s\n' "$current"
    started=$SECONDS
    result=ok
    "stage_$current" || { result=FAILED; failures=$((failures + 1)); }
    table+=("$(printf '%-10s %8d  %s' "$current" $((SECONDS - started)) "$result")")
done

report
if ((SECONDS > limit_s)); then
    echo "test.sh: took longer than $limit_s s" >&2
    exit 1
fi
if ((failures > 0)); then
    echo "test.sh: $failures of ${#table[@]} stages failed" >&2
    exit 1
fi
