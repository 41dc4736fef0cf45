"""The package is what the crate is, and asks for no more than an image of SGLang has."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import engram_sglang


def test_version_is_that_of_the_crate(root: pathlib.Path) -> None:
    crate = tomllib.loads((root / "Cargo.toml").read_text())["package"]["version"]
    assert engram_sglang.__version__ == crate
    assert importlib.metadata.version("engram-sglang") == crate


def test_dependencies_are_three_and_unbounded_above(root: pathlib.Path) -> None:
    project = tomllib.loads((root / "python-shim/pyproject.toml").read_text())["project"]
    names = {re.split(r"[^A-Za-z0-9_-]", d)[0] for d in project["dependencies"]}
    assert names <= {"grpcio", "numpy", "protobuf"}
    assert not [d for d in project["dependencies"] if re.search(r"<|==|~=", d)]


def test_import_loads_nothing_of_a_gpu_or_an_engine() -> None:
    code = (
        "import sys, engram_sglang\n"
        "print(sorted({'torch', 'sglang', 'cuda', 'grpc'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def pins(path: pathlib.Path) -> dict[str, set[str]]:
    """name -> the versions that a requirements file may install, whatever the interpreter."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([A-Za-z_-]+)==([^\s;]+)", path.read_text(), re.M):
        found.setdefault(name.lower(), set()).add(version)
    return found


def test_environment_is_the_one_it_is_meant_to_be(root: pathlib.Path) -> None:
    runtime = os.environ.get("ENGRAM_RUNTIME")
    if runtime is None:
        return  # Run by hand, in an environment of the caller's own.
    pinned = pins(root / f"python-shim/requirements-{runtime}.txt")
    for name in ("protobuf", "grpcio", "numpy"):
        assert importlib.metadata.version(name) in pinned[name], name


def test_oldest_and_newest_are_two_major_versions_of_protobuf(root: pathlib.Path) -> None:
    majors = {
        runtime: {v.split(".")[0] for v in pins(root / f"python-shim/requirements-{runtime}.txt")["protobuf"]}
        for runtime in ("old", "new")
    }
    assert majors["old"] == {"5"}
    assert max(map(int, majors["new"])) > 5
