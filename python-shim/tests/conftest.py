"""Fixtures that all tests of the package share."""

import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import client_both
import pytest
from client_stage import Stage

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


@pytest.fixture(scope="session")
def stage(engram_bin: pathlib.Path) -> Iterator[Stage]:
    """The daemon and the embedded engine, for all tests of the client that leave them running."""
    stage = Stage(engram_bin)
    yield stage
    stage.end()


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes clients: the test runs with each of both."""
    with client_both.maker(request.param) as make:
        yield make
