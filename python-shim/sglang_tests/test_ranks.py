"""Two ranks of a server: the same decisions in the same iteration, and no deadlock, whatever each one's daemon does."""

from __future__ import annotations

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

HERE = pathlib.Path(__file__).resolve().parent
SCENARIOS = [
    "plain", "late", "missing_shard", "one_session", "refused_by_one", "boundaries", "less_kv", "broken_daemon", "fault",
    "asked_again", "storm",
]


class Pair:
    """Two processes, each one rank (`rank.py`), which play one scenario after the other."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.calm = folder, False
        self.logs = [folder / f"rank{rank}.log" for rank in range(2)]
        self.processes, self.answers = [], queue.SimpleQueue[int]()
        for rank, log in enumerate(self.logs):
            with open(log, "wb") as out:
                process = subprocess.Popen(
                    [sys.executable, str(HERE / "rank.py"), str(rank), str(folder)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, cwd=HERE, text=True,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                )  # fmt: skip
            self.processes.append(process)
            threading.Thread(target=self._listen, args=(rank, process), daemon=True).start()
        # Loading SGLang twice takes its time on a busy machine.
        self._wait(250, lambda: None)

    def _listen(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for _ in process.stdout:
            self.answers.put(rank)

    def play(self, name: str, daemon: Any, seed: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Plays it on both ranks. `meanwhile` may do harm until they ask for calm."""
        self.calm = False
        for name_ in ("calm", "calm.seen"):
            (self.folder / name_).unlink(missing_ok=True)
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([name, daemon.target, daemon.port, seed]) + "\n")
            process.stdin.flush()
        self._wait(110, meanwhile)

    def _wait(self, seconds: float, meanwhile: Callable[[], None]) -> None:
        """Until both ranks have answered."""
        end, answered = time.monotonic() + seconds, 0
        while answered < 2:
            if not self.calm:
                meanwhile()
            if not self.calm and (self.folder / "calm").exists():
                self.calm = True
                (self.folder / "calm.seen").touch()
            gone = [process.poll() for process in self.processes]
            assert gone == [None, None] and time.monotonic() < end, self.told()
            try:
                self.answers.get(timeout=0.05)
                answered += 1
            except queue.Empty:
                pass

    def told(self) -> str:
        """What the ranks had to say."""
        for process in self.processes:
            # The other one says something, too, when this is why it cannot go on.
            if process.poll() is None:
                process.kill()
            process.wait()
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}" for log in self.logs)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Pair]]:
    """The pair of this module, or a new one after a failure."""
    made: list[Pair] = []

    def get() -> Pair:
        if not made or any(process.poll() is not None for process in made[-1].processes):
            made.append(Pair(tmp_path_factory.mktemp("ranks")))
        return made[-1]

    yield get
    for pair in made:
        pair.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(name: str, pairs: Any, daemon: Any, seed: int) -> None:
    pairs().play(name, daemon(ram="256MiB"), seed)


@pytest.mark.timeout(400)
def test_two_ranks_while_the_daemon_dies(pairs: Any, daemon: Any, seed: int) -> None:
    one = daemon(ram="256MiB")
    deaths, since = [0], [time.monotonic()]

    def kill() -> None:
        if deaths[0] < 4 and time.monotonic() > since[0] + 1.5:
            one.kill()
            one.start()
            deaths[0] += 1
            since[0] = time.monotonic()

    pairs().play("storm", one, seed, kill)
    assert deaths[0] > 0


@pytest.mark.timeout(400)
def test_two_ranks_of_data_parallel_attention(pairs: Any, daemon: Any, seed: int) -> None:
    """The last one: they go each its own way, and SGLang 0.5.17 numbers nodes through all servers of a process."""
    pairs().play("apart", daemon(ram="256MiB"), seed)
