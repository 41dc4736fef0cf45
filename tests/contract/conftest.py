"""The real daemon with the embedded engine behind it, for tests from its own OpenAPI document."""

import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "python-shim" / "tests"))

from client_stage import Stage  # noqa: E402


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    stage = Stage(pathlib.Path(os.environ["ENGRAM_BIN"]))
    try:
        yield stage
    finally:
        stage.end()
