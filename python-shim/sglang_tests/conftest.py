"""Tests of the shim in SGLang's own classes, in an environment that has SGLang (see `install.sh`)."""

from __future__ import annotations

import importlib
import itertools
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

warnings.filterwarnings("ignore")
HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import sglang  # noqa: E402

from daemon import Daemon  # noqa: E402
from engram_sglang.settings import Settings  # noqa: E402

world_module = importlib.import_module("world_" + sglang.__version__.replace(".", "_"))

from sglang.srt.plugins import load_plugins  # noqa: E402

# As SGLang does in each of its processes: the plug-in is found by its entry point.
load_plugins()

World = world_module.World

_seeds = itertools.count(1000)


@pytest.fixture(scope="session")
def binary() -> pathlib.Path:
    """The daemon, as ./test.sh builds it."""
    path = pathlib.Path(os.environ.get("ENGRAM_BIN", ROOT / "target/release/engram"))
    assert path.is_file(), f"{path} is missing: run ./test.sh build, or set ENGRAM_BIN"
    return path


@pytest.fixture(scope="session")
def shared_daemon(binary: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for tests that leave it alone. Each world has weights of its own there."""
    daemon = Daemon(binary, tmp_path_factory.mktemp("d"), ram="256MiB")
    yield daemon
    daemon.stop()


@pytest.fixture
def seed() -> int:
    """Weights that no other test has."""
    return next(_seeds)


@pytest.fixture
def daemon(binary: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Callable[..., Daemon]]:
    """Makes daemons of the test's own."""
    made: list[Daemon] = []

    def make(**how: Any) -> Daemon:
        made.append(Daemon(binary, tmp_path / f"d{len(made)}", **how))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture(params=World.CORES)
def world(seed: int, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes servers, on each of SGLang's tree cores; with `daemon`, attached ones."""
    made: list[Any] = []

    def make(daemon: Daemon | None = None, *, settings: dict[str, Any] | None = None, **how: Any) -> Any:
        how.setdefault("seed", seed)
        how.setdefault("core", request.param)
        target = daemon.target if daemon is not None else "unix:///nonexistent/engram.sock"
        chosen = Settings(**{"daemon": target, "ring_bytes": 8 << 20, "retry_ms": 50, "lookup_ms": 10_000, **(settings or {})})
        one = World(settings=chosen, **how)
        made.append(one)
        if daemon is not None:
            one.until(lambda: one.shim.session is not None, what="attaching")
        return one

    yield make
    for one in made:
        one.close()
        one.shim_faults = one.shim.counts["faults"] if one.shim is not None else 0
    assert all(one.shim_faults == 0 for one in made), "the shim met something unexpected"
