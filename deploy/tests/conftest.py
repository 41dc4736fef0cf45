"""Fixtures of the deployment's tests."""

import os
import pathlib

import pytest
from deployment import ROOT


@pytest.fixture(scope="session")
def engram_bin() -> pathlib.Path:
    """The daemon's binary, as ./test.sh builds it."""
    path = pathlib.Path(os.environ.get("ENGRAM_BIN", ROOT / "target/release/engram"))
    assert path.is_file(), f"{path} is missing: run ./test.sh build, or set ENGRAM_BIN"
    return path
