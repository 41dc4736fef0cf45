"""The real daemon with the embedded engine as the server behind it, and a tokenizer that both could use."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

DEADLINE_S = 60
END_S = 20
"""A process that does not end by itself within this time is killed: of a test's two minutes some must be left."""
VOCABULARY = 2048
"""Tokens of the embedded engine's model."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)

T = TypeVar("T")


def wait_for(what: str, probe: Callable[[], T]) -> T:
    """What the probe finds, once it finds something."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            if found := probe():
                return found
        time.sleep(0.02)
    raise AssertionError(f"waited in vain for {what}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def write_tokenizer(folder: pathlib.Path) -> None:
    """One token for each byte, three special ones, and one for each further id of the model."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {letter: len(SPECIAL) + byte for byte, letter in enumerate(_letters())}
    vocab |= {text: at for at, text in enumerate(SPECIAL)}
    more = [(at, f" ~{at}~", False) for at in range(len(vocab), VOCABULARY)]
    added = [
        {"id": at, "content": text, "special": special, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for at, text, special in [*((at, text, True) for at, text in enumerate(SPECIAL)), *more]
    ]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                 "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level, "model": model}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": None}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


class Process:
    """A process of the binary, with a log."""

    def __init__(self, log: pathlib.Path, *args: object) -> None:
        self.log = log
        with log.open("ab") as out:
            self.child = subprocess.Popen([str(arg) for arg in args], stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def check(self) -> None:
        assert self.child.poll() is None, self.log.read_text(errors="replace")[-2000:]

    def end(self, how: int = signal.SIGTERM) -> None:
        self.child.send_signal(how)
        try:
            self.child.wait(END_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


class Stage:
    """Both, in a folder of their own."""

    def __init__(self, binary: pathlib.Path, *, token: str | None = None, engine: bool = True) -> None:
        self.binary = binary
        # Not pytest's own folder: the path of a socket must be short.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="engram-"))
        self.port = free_port()
        self.url, self.unix = f"http://127.0.0.1:{self.port}", f"unix:{self.folder}/rest.sock"
        self.engine = self.daemon = None
        try:
            engine_url = self._start_engine() if engine else ""
            (self.folder / "token").write_text(f"{token}\n")
            (self.folder / "engram.toml").write_text(f'''
[rest]
listen = "127.0.0.1:{self.port}"
socket = "{self.folder}/rest.sock"
max_generate_body = "4 MiB"
{'token_file = "' + str(self.folder / "token") + '"' if token else ""}
[grpc]
socket = "{self.folder}/grpc.sock"
[store]
ram = "64 MiB"
[store.disk]
path = "{self.folder}/data"
budget = "1 GiB"
min_free = "1 MiB"
[service]
fd_socket = "{self.folder}/fd.sock"
write_after = "50ms"
{f'[upstream]{chr(10)}url = "{engine_url}"' if engine else ""}
''')
            self.start()
            if engine:
                wait_for("the engine to attach", self._attached)
        except BaseException:
            self.end()
            raise

    engine: Process | None
    daemon: Process | None

    def _start_engine(self) -> str:
        write_tokenizer(self.folder / "tokenizer")
        announced = self.folder / "engine.json"
        self.engine = engine = Process(
            self.folder / "engine.log", self.binary, "engine", "--listen", "127.0.0.1:0", "--announce", announced,
            "--tokenizer", self.folder / "tokenizer", "--engram", self.folder / "grpc.sock", "--page-size", 1,
            "--exact-end", "--pages", 30000,
        )

        def url() -> str:
            engine.check()
            found: str = json.loads(announced.read_bytes())["http"]
            return found

        return wait_for("the engine's address", url)

    def start(self) -> None:
        """Starts the daemon, and waits until it is ready."""
        self.daemon = daemon = Process(
            self.folder / "daemon.log", self.binary, "serve", "--config", self.folder / "engram.toml"
        )

        def ready() -> bool:
            daemon.check()
            return bool(self.get("/readyz")["ready"])

        wait_for("a ready daemon", ready)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=DEADLINE_S) as answer:
            return json.load(answer)

    def _attached(self) -> bool:
        return any(worker["bound"] for worker in self.get("/v1/workers")["workers"])

    def restart(self) -> None:
        """Kills the daemon and starts it again at the same addresses."""
        assert self.daemon is not None
        self.daemon.end(signal.SIGKILL)
        self.start()
        wait_for("the engine to attach", self._attached)

    def end(self) -> None:
        for process in (self.daemon, self.engine):
            if process is not None:
                process.end()
        shutil.rmtree(self.folder, ignore_errors=True)
