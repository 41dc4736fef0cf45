"""The unit, the manifest and the image agree with the crate and with each other."""

import pathlib
import re
import shutil
import subprocess
import tomllib

import deployment
import pytest
from deployment import ROOT

CRATE = tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]


def test_unit_starts_and_stops_the_daemon_as_it_expects() -> None:
    service = deployment.unit()["Service"]
    assert deployment.unit_command() == deployment.image_command()
    assert service["Type"] == ["notify"]
    assert service["KillSignal"] == ["SIGTERM"]
    assert service["Restart"] == ["on-failure"]
    assert service["RestartPreventExitStatus"] == ["64"]
    # The folders that the defaults of the configuration name.
    assert service["StateDirectory"] == service["RuntimeDirectory"] == ["engram"]
    assert int(service["TimeoutStopSec"][0]) > 0


def test_unit_runs_as_the_user_that_is_made_for_it() -> None:
    service = deployment.unit()["Service"]
    lines = deployment.SYSUSERS.read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("u ")]
    assert service["User"] == service["Group"] == users


def systemd_analyze(*args: str) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    return subprocess.run([tool, *args], capture_output=True, text=True, timeout=60)


@pytest.fixture
def installed_unit(tmp_path: pathlib.Path, engram_bin: pathlib.Path) -> str:
    """The unit as it would be installed, but for the binary's place."""
    text = deployment.UNIT.read_text()
    command = deployment.unit_command()[0]
    assert text.count(command) == 1
    path = tmp_path / "engram.service"
    path.write_text(text.replace(command, str(engram_bin)))
    return str(path)


def test_systemd_accepts_the_unit(installed_unit: str) -> None:
    run = systemd_analyze("verify", "--man=no", installed_unit)
    said = [line for line in run.stderr.splitlines() if "engram" in line]
    assert (run.returncode, said) == (0, [])


def test_unit_is_confined(installed_unit: str) -> None:
    run = systemd_analyze("security", "--offline=true", "--threshold=25", installed_unit)
    assert run.returncode == 0, run.stdout[-500:]


def test_image_is_built_with_the_crate_s_compiler() -> None:
    bases = [rest.split()[0] for word, rest in deployment.dockerfile() if word == "FROM"]
    assert bases == [f"rust:{CRATE['rust-version']}-bookworm", "debian:bookworm-slim"]


def test_image_is_built_from_files_that_its_context_holds() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    context = {line[1:] for line in ignore[1:]}
    copied: set[str] = set()
    for word, rest in deployment.dockerfile():
        if word == "COPY" and not rest.startswith("--from"):
            copied |= set(rest.split()[:-1])
    assert copied == context


def test_image_and_pod_run_as_the_same_user() -> None:
    (user,) = [rest for word, rest in deployment.dockerfile() if word == "USER"]
    security = deployment.container("engram")["securityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert deployment.pod()["securityContext"]["fsGroup"] == security["runAsGroup"]
    assert security["runAsNonRoot"] and not security["allowPrivilegeEscalation"]
    assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}


def test_pod_runs_this_version_with_the_image_s_command() -> None:
    engram = deployment.container("engram")
    assert engram["image"] == f"engram:{CRATE['version']}"
    assert "command" not in engram, "the image's ENTRYPOINT"
    assert engram["args"] == deployment.image_command()[1:]


def test_every_mount_is_a_volume_and_the_sockets_are_shared() -> None:
    pod = deployment.pod()
    claims = deployment.manifest()["StatefulSet"]["spec"]["volumeClaimTemplates"]
    volumes = {v["name"]: v for v in pod["volumes"]}
    names = set(volumes) | {c["metadata"]["name"] for c in claims}
    mounts = {
        c["name"]: {m["name"]: m["mountPath"] for m in c["volumeMounts"]} for c in pod["containers"]
    }
    assert set().union(*mounts.values()) == names
    assert mounts["sglang"]["engram-run"] == mounts["engram"]["engram-run"] == "/run/engram"
    assert "emptyDir" in volumes["engram-run"]
    # What must outlive the pod is on a claim, and SGLang cannot touch it.
    assert "engram-data" not in volumes and "engram-data" not in mounts["sglang"]
    kinds = deployment.manifest()
    assert volumes["engram-config"]["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"]
    assert volumes["engram-token"]["secret"]["secretName"] == kinds["Secret"]["metadata"]["name"]


def quantity(text: str) -> int:
    """Bytes of "8 GiB" (the daemon's configuration) or "8Gi" (Kubernetes)."""
    number, unit = re.fullmatch(r"(\d+) ?([KMGT])iB?", text).groups()
    return int(number) << {"K": 10, "M": 20, "G": 30, "T": 40}[unit]


def test_budgets_fit_what_the_pod_is_given() -> None:
    config = tomllib.loads(deployment.manifest()["ConfigMap"]["data"]["engram.toml"])
    resources = deployment.container("engram")["resources"]
    ram = quantity(config["store"]["ram"])
    assert ram < quantity(resources["requests"]["memory"]) <= quantity(resources["limits"]["memory"])
    (claim,) = deployment.manifest()["StatefulSet"]["spec"]["volumeClaimTemplates"]
    disk = config["store"]["disk"]
    size = quantity(claim["spec"]["resources"]["requests"]["storage"])
    assert quantity(disk["budget"]) + quantity(disk["min_free"]) < size
    mounts = {m["mountPath"] for m in deployment.container("engram")["volumeMounts"]}
    assert disk["path"] in mounts
    token = pathlib.PurePath(config["rest"]["token_file"])
    assert str(token.parent) in mounts and token.name in deployment.manifest()["Secret"]["stringData"]


def test_probes_reach_the_port_that_the_daemon_listens_on() -> None:
    engram = deployment.container("engram")
    config = tomllib.loads(deployment.manifest()["ConfigMap"]["data"]["engram.toml"])
    (port,) = engram["ports"]
    host, _, listened = config["rest"]["listen"].rpartition(":")
    assert (host, int(listened)) == ("0.0.0.0", port["containerPort"])
    probes = {name: probe["httpGet"] for name, probe in engram.items() if name.endswith("Probe")}
    assert {p["path"] for p in probes.values()} == {"/healthz", "/readyz"}
    assert {p["port"] for p in probes.values()} == {port["name"]}
    # A daemon that is not ready must not take SGLang's traffic away.
    assert "readinessProbe" not in engram


def test_pod_gives_the_daemon_time_to_write_down() -> None:
    grace = deployment.pod()["terminationGracePeriodSeconds"]
    assert grace >= int(deployment.unit()["Service"]["TimeoutStopSec"][0])
