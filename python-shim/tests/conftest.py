"""Fixtures that all tests of the package share."""

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The top of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def engram_bin() -> pathlib.Path:
    """The daemon's binary, as ./test.sh builds it."""
    path = pathlib.Path(os.environ.get("ENGRAM_BIN", ROOT / "target/release/engram"))
    assert path.is_file(), f"{path} is missing: run ./test.sh build, or set ENGRAM_BIN"
    return path
