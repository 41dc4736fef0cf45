"""What the unit, the image and the manifest say is what this version of the daemon does."""

import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import Iterator
from typing import Any

import deployment
import pytest
from deployment import ROOT

CONFIGURATIONS = {
    "unit": (ROOT / "deploy/engram.example.toml").read_text(),
    "pod": deployment.manifest()["ConfigMap"]["data"]["engram.toml"],
}
TOKEN: str = deployment.manifest()["Secret"]["stringData"]["token"]
# Folders that the unit and the pod make for the daemon, and those of a test in their stead.
FOLDERS = {"/run/engram": "run", "/var/lib/engram": "data", "/etc/engram-token": "token"}
DEADLINE_S = 60


def relocated(value: Any, folder: pathlib.Path) -> Any:
    """`value` with every folder of FOLDERS moved below `folder`."""
    if isinstance(value, dict):
        return {key: relocated(inner, folder) for key, inner in value.items()}
    if isinstance(value, str):
        for place, name in FOLDERS.items():
            if value == place or value.startswith(place + "/"):
                return str(folder / name) + value.removeprefix(place)
    return value


def toml(table: dict[str, Any], name: str = "") -> str:
    """The table as TOML: strings, numbers, booleans, lists and tables of them."""
    lines = [f"[{name}]"] if name else []
    lines += [f"{key} = {json.dumps(v)}" for key, v in table.items() if not isinstance(v, dict)]
    text = "\n".join(lines) + "\n"
    for key, inner in table.items():
        if isinstance(inner, dict):
            text += toml(inner, f"{name}.{key}" if name else key)
    return text


@pytest.fixture(params=CONFIGURATIONS)
def config(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    """A configuration that is deployed: its own folders and ports, and tiers of a test's size."""
    parsed = relocated(tomllib.loads(CONFIGURATIONS[request.param]), tmp_path)
    for name in FOLDERS.values():
        (tmp_path / name).mkdir(mode=0o700)
    token = tmp_path / "token/token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    for section in parsed.values():
        if "listen" in section:
            section["listen"] = "127.0.0.1:0"
    parsed["rest"]["socket"] = str(tmp_path / "run/rest.sock")
    parsed["store"]["ram"] = "64 MiB"
    parsed["store"]["disk"].update(budget="64 MiB", min_free="1 MiB")
    parsed.setdefault("service", {})["preload"] = "16 MiB"
    # Where the defaults would lie, too.
    parsed["service"].setdefault("fd_socket", str(tmp_path / "run/fd.sock"))
    parsed.setdefault("grpc", {}).setdefault("socket", str(tmp_path / "run/engram.sock"))
    path = tmp_path / "engram.toml"
    path.write_text(toml(parsed))
    return path


def ask(path: pathlib.Path, method: str, target: str, **more: Any) -> tuple[int, bytes]:
    """One request over a Unix socket: status and body."""
    connection = http.client.HTTPConnection("localhost", timeout=DEADLINE_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(DEADLINE_S)
    connection.sock.connect(str(path))
    with contextlib.closing(connection):
        connection.request(method, target, **more)
        response = connection.getresponse()
        return response.status, response.read()


@contextlib.contextmanager
def started(command: list[str], folder: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `command` as systemd would, and yields once it has said that it is ready."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        address = folder / "notify"
        notify.bind(str(address))
        notify.settimeout(0.2)
        log = folder / "log"
        with log.open("wb") as output:
            daemon = subprocess.Popen(
                command,
                env=os.environ | {"NOTIFY_SOCKET": str(address)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            deadline = time.monotonic() + DEADLINE_S
            said = b""
            while b"READY=1" not in said.split(b"\n"):
                assert daemon.poll() is None, f"ended with {daemon.returncode}: {log.read_text()}"
                assert time.monotonic() < deadline, f"never ready: {log.read_text()}"
                with contextlib.suppress(TimeoutError):
                    said = notify.recv(4096)
            yield daemon
        finally:
            if daemon.poll() is None:
                daemon.kill()
            daemon.wait()


def command(engram_bin: pathlib.Path, config: pathlib.Path) -> list[str]:
    """The unit's command (and so the image's), with this binary and configuration."""
    program, *args = deployment.unit_command()
    assert program == "/usr/bin/engram"
    assert args[-1] == "/etc/engram/engram.toml"
    return [str(engram_bin), *args[:-1], str(config)]


def test_daemon_gets_ready_answers_probes_and_ends(
    engram_bin: pathlib.Path, config: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    engram = deployment.container("engram")
    probes = [probe["httpGet"]["path"] for name, probe in engram.items() if name.endswith("Probe")]
    rest = tmp_path / "run/rest.sock"
    with started(command(engram_bin, config), tmp_path) as daemon:
        for path in [*probes, "/metrics"]:
            status, body = ask(rest, "GET", path)
            assert status == 200, (path, body)
        if "token_file" in tomllib.loads(config.read_text())["rest"]:
            assert ask(rest, "POST", "/list_snapshots")[0] == 401
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        body = json.dumps({"conversation_id": "none"})
        status, answer = ask(rest, "POST", "/list_snapshots", body=body, headers=headers)
        assert status == 200, answer
        (name,) = deployment.unit()["Service"]["KillSignal"]
        daemon.send_signal(signal.Signals[name])
        timeout = int(deployment.unit()["Service"]["TimeoutStopSec"][0])
        assert daemon.wait(timeout) == 0, (tmp_path / "log").read_text()
    assert not rest.exists()


def test_deployed_configurations_are_accepted_as_they_are(
    engram_bin: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for name, text in CONFIGURATIONS.items():
        # The token alone is moved: it must be there to be read.
        path = tmp_path / f"{name}.toml"
        token = tmp_path / "token"
        token.write_text(TOKEN + "\n")
        token.chmod(0o600)
        path.write_text(text.replace("/etc/engram-token/token", str(token)))
        check = [*command(engram_bin, path), "--check"]
        run = subprocess.run(check, capture_output=True, text=True, timeout=DEADLINE_S)
        assert run.returncode == 0, (name, run.stderr)


def test_bad_configuration_ends_with_the_status_that_is_not_restarted(
    engram_bin: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "engram.toml"
    path.write_text("[store]\nrum = 1\n")
    run = subprocess.run(
        command(engram_bin, path), capture_output=True, text=True, timeout=DEADLINE_S
    )
    statuses = deployment.unit()["Service"]["RestartPreventExitStatus"]
    assert [str(run.returncode)] == statuses
    assert "rum" in run.stderr


def test_daemon_gives_up_writing_down_before_it_is_killed() -> None:
    seconds = int(deployment.unit()["Service"]["TimeoutStopSec"][0])
    example = tomllib.loads(CONFIGURATIONS["unit"])
    drain = example["service"]["drain_timeout"]
    assert drain.endswith("s") and int(drain[:-1]) < seconds
    # The pod leaves it at the default, which is what the example shows.
    assert "drain_timeout" not in tomllib.loads(CONFIGURATIONS["pod"]).get("service", {})


def test_files_that_the_image_is_built_from_exist() -> None:
    for word, rest in deployment.dockerfile():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
