"""The real daemon, as a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.request
from typing import Any


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Daemon:
    """`engram serve`."""

    def __init__(
        self, binary: pathlib.Path, folder: pathlib.Path, *, ram: str = "64MiB", ram_headroom: str = "", hold: str = "",
        service: str = "", start: bool = True,
    ) -> None:
        self.binary, self.folder, self.hold = binary, folder, hold
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.socket = folder / "g.sock"
        self.log = folder / "daemon.log"
        self.config = folder / "engram.toml"
        self.config.write_text(
            f'''[rest]
listen = "127.0.0.1:{self.port}"
[grpc]
socket = "{self.socket}"
[store]
ram = "{ram}"
[store.disk]
path = "{folder}/data"
budget = "1GiB"
min_free = "1MiB"
[service]
fd_socket = "{folder}/fd.sock"
write_after = "50ms"
{service}
'''
        )
        self.process: subprocess.Popen[bytes] | None = None
        if start:
            self.start()

    @property
    def target(self) -> str:
        """What ENGRAM_DAEMON would be."""
        return f"unix://{self.socket}"

    def start(self) -> None:
        env = {**os.environ, "ENGRAM_HOLD": self.hold}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [self.binary, "serve", "--config", self.config], stdout=log, stderr=log, env=env
            )
        end = time.monotonic() + 20
        while True:
            try:
                if self.get("/readyz", raw=True) is not None:
                    return
            except OSError:
                pass
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < end, "the daemon does not get ready: " + self.log.read_text()[-2000:]
            time.sleep(0.02)

    def get(self, path: str, raw: bool = False) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            body = answer.read()
        return body if raw else json.loads(body)

    def delete_all(self) -> int:
        """Deletes every snapshot; how many there were."""
        rows = self.get("/v1/snapshots")["snapshots"]
        for row in rows:
            body = json.dumps({"snapshot_id": row["snapshot_id"]}).encode()
            call = urllib.request.Request(
                f"http://127.0.0.1:{self.port}/delete_snapshot", body, {"Content-Type": "application/json"}
            )
            urllib.request.urlopen(call, timeout=5).close()
        return len(rows)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics, by name with labels."""
        out = {}
        for line in self.get("/metrics", raw=True).decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                out[name] = float(value)
        return out

    def has_durable(self, boundary: int) -> bool:
        """Whether a snapshot at this boundary survives a crash."""
        rows = self.get("/v1/snapshots")["snapshots"]
        return any(row["boundary"] == boundary and row["durable"] for row in rows)

    def pause(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"the daemon ended with {status}"

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and wait."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
