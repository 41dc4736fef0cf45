"""A server that is killed and started again, as processes of the operating system."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from test_turns import words

MODES = [
    pytest.param({"page_size": 64, "overlap": True, "lag": 2}, 640, id="page64-overlap"),
    pytest.param({"page_size": 1, "extra_buffer": False}, 707, id="page1-no_buffer"),
]


class Server:
    """`serve.py`."""

    def __init__(self, daemon: Any, seed: int, mode: dict[str, Any]) -> None:
        script = pathlib.Path(__file__).with_name("serve.py")
        self._process = subprocess.Popen(
            [sys.executable, script, daemon.target, str(seed), json.dumps(mode)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )

    def turn(self, tokens: list[int], new: int) -> Any:
        """One request, to its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"tokens": tokens, "new": new}), file=self._process.stdin, flush=True)
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(f"the server ended with {self._process.wait()}")

    def kill(self) -> None:
        """kill -9, and wait."""
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize(("mode", "boundary"), MODES)
def test_turns_go_on_in_another_process(
    binary: Any, daemon: Any, seed: int, mode: dict[str, Any], boundary: int
) -> None:
    d = daemon()
    servers = [Server(d, seed, mode), Server(d, seed, mode)]
    try:
        first = servers[0].turn(words(seed, 700), 8)
        assert first["restored"] == 0
        servers[0].kill()
        second = servers[1].turn(first["tokens"] + [1, 2, 3], 8)
        assert second["restored"] == boundary
    finally:
        for server in servers:
            server.kill()
