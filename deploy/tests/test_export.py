"""What `engram export` writes is what Python's safetensors opens."""

import contextlib
import json
import math
import pathlib
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import safetensors

DEADLINE_S = 60
PROMPT = [(7 * i + 3) % 250 for i in range(1536)]
CHUNK = 1 << 20


@contextlib.contextmanager
def process(log: pathlib.Path, *args: object) -> Iterator[None]:
    with log.open("wb") as out:
        child = subprocess.Popen(
            [str(arg) for arg in args], stdin=subprocess.PIPE, stdout=out, stderr=out
        )
        try:
            yield
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            assert child.stdin
            child.stdin.close()


def wait_for(what: str, probe: Any) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if found := probe():
                return found
        time.sleep(0.02)
    raise AssertionError(f"waited in vain for {what}")


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def exported(
    engram_bin: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[pathlib.Path, dict[str, Any]]]:
    """The name of a pair that a daemon exported, and the description of its snapshot."""
    folder = tmp_path_factory.mktemp("export")
    config = folder / "engram.toml"
    config.write_text(
        f"""
        [rest]
        listen = "127.0.0.1:0"
        [grpc]
        socket = "{folder}/grpc.sock"
        [service]
        fd_socket = "{folder}/fd.sock"
        [store]
        ram = "64 MiB"
        [store.disk]
        path = "{folder}/data"
        budget = "256 MiB"
        min_free = "1 MiB"
        """
    )
    daemon, engine = folder / "daemon.json", folder / "engine.json"
    serve = [engram_bin, "--lifeline", "serve", "--config", config, "--announce", daemon]
    listen = ["--listen", "127.0.0.1:0", "--announce", engine]
    beside = ["--engram", f"{folder}/grpc.sock"]
    with process(folder / "daemon.log", *serve):
        rest = wait_for("the daemon", lambda: json.loads(daemon.read_text()))["rest"]
        wait_for("a ready daemon", lambda: ask(f"{rest}/readyz"))
        with process(folder / "engine.log", engram_bin, "--lifeline", "engine", *listen, *beside):
            url = wait_for("the engine", lambda: json.loads(engine.read_text()))["http"]
            wait_for("a worker", lambda: ask(f"{rest}/v1/workers")["workers"])
            turn = {
                "input_ids": PROMPT,
                "sampling_params": {"max_new_tokens": 4, "temperature": 0.0},
                "rid": "first",
                "session_id": "chat",
            }
            ask(f"{url}/generate", turn)
            ask(f"{rest}/save_snapshot", {"conversation_id": "chat"})
        info = ask(f"{rest}/get_snapshot_info", {"conversation_id": "chat", "turn_number": 1})
        name = folder / "chat"
        command = [engram_bin, "export", "chat", "--out", name, "--url", rest]
        subprocess.run(command, check=True, timeout=DEADLINE_S)
        yield name, info["metadata"]


def crc32c(data: bytes) -> int:
    """CRC-32C, by the book."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def test_names_shapes_and_types_are_those_of_the_description(
    exported: tuple[pathlib.Path, dict[str, Any]],
) -> None:
    name, info = exported
    said = json.loads(name.with_suffix(".json").read_text())
    tensors = dict(safetensors.deserialize(name.with_suffix(".safetensors").read_bytes()))
    boundary = info["boundary"]
    assert said["boundary"] == boundary > 1024
    expected: dict[str, tuple[str, list[int]]] = {"tokens": ("U32", [boundary])}
    for rank in range(said["shards"]):
        for state in said["geometry"]["state"]:
            shape = [len(state["layers"]), *state["shape"]]
            expected[f"rank.{rank}.state.{state['name']}"] = (state["dtype"], shape)
        layers = said["geometry"]["kv"]
        first = layers[0]
        assert all({**layer, "layer": 0} == {**first, "layer": 0} for layer in layers)
        for start in range(0, boundary, 1024):
            end = min(start + 1024, boundary)
            shape = [len(layers), 2, end - start, first["heads"], first["k_head_dim"]]
            expected[f"rank.{rank}.kv.{start}-{end}"] = (first["dtype"], shape)
    found = {key: (it["dtype"], list(it["shape"])) for key, it in tensors.items()}
    pads = [key for key in found if key.startswith("_pad.")]
    assert {key: it for key, it in found.items() if key not in pads} == expected
    for key in pads:
        assert found[key][0] == "U8" and not any(tensors[key]["data"]), key


def test_bytes_are_those_of_the_checksums_and_tokens_those_of_the_daemon(
    exported: tuple[pathlib.Path, dict[str, Any]],
) -> None:
    name, info = exported
    said = json.loads(name.with_suffix(".json").read_text())
    data = name.with_suffix(".safetensors").read_bytes()
    assert (said["format"], said["format_version"], said["encoding"]) == ("engram.snapshot", 1, "raw")
    assert (len(data), said["chunk_bytes"]) == (said["file_bytes"], CHUNK)
    chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    assert said["checksums"] == [f"{crc32c(chunk):08x}" for chunk in chunks]
    with safetensors.safe_open(name.with_suffix(".safetensors"), framework="numpy") as file:
        metadata = file.metadata()
        tokens = file.get_tensor("tokens")
    assert metadata["snapshot"] == said["snapshot"] == info["snapshot_id"]
    assert metadata["fingerprint"] == said["fingerprint"] == info["fingerprint"]
    assert tokens.dtype == numpy.uint32
    assert tokens.tolist() == info["fill_ids"]
    assert tokens[: len(PROMPT)].tolist() == PROMPT[: len(tokens)]
    assert said["names"]["conversation"] == "chat" and said["names"]["turn"] == 1


def test_every_state_and_block_starts_at_a_page(
    exported: tuple[pathlib.Path, dict[str, Any]],
) -> None:
    data = exported[0].with_suffix(".safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    assert (8 + length) % 4096 == 0
    end = 0
    for key, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = tensor["data_offsets"]
        assert start == end, f"a hole before {key}"
        end = stop
        assert ".kv." not in key or start % 4096 == 0, key
        bits = {"U8": 8, "U32": 32, "F32": 32, "BF16": 16, "F16": 16}[tensor["dtype"]]
        assert stop - start == math.prod(tensor["shape"]) * bits // 8, key
    assert 8 + length + end == len(data)
