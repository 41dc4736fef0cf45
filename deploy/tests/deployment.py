"""Reads the unit, the manifest and the Dockerfile as what they run would."""

import json
import pathlib
import re
import shlex
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy/systemd/engram.service"
SYSUSERS = ROOT / "deploy/systemd/engram.sysusers.conf"
MANIFEST = ROOT / "deploy/kubernetes/sidecar.yaml"
DOCKERFILE = ROOT / "deploy/Dockerfile"


def unit() -> dict[str, dict[str, list[str]]]:
    """section -> key -> values: a key may stand in a unit more than once."""
    sections: dict[str, dict[str, list[str]]] = {}
    current: dict[str, list[str]] = {}
    for number, line in enumerate(UNIT.read_text().splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if header := re.fullmatch(r"\[(\w+)\]", line):
            current = sections.setdefault(header[1], {})
            continue
        key, equals, value = line.partition("=")
        assert equals and re.fullmatch(r"[A-Za-z]+", key), f"{UNIT}:{number}: {line}"
        current.setdefault(key, []).append(value)
    return sections


def unit_command() -> list[str]:
    (command,) = unit()["Service"]["ExecStart"]
    return shlex.split(command)


def manifest() -> dict[str, dict[str, Any]]:
    """kind -> object; each kind is there once."""
    objects = list(yaml.safe_load_all(MANIFEST.read_text()))
    kinds = {o["kind"]: o for o in objects}
    assert len(kinds) == len(objects)
    return kinds


def pod() -> dict[str, Any]:
    return manifest()["StatefulSet"]["spec"]["template"]["spec"]


def container(name: str) -> dict[str, Any]:
    (found,) = [c for c in pod()["containers"] if c["name"] == name]
    return found


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest), continued lines joined."""
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def image_command() -> list[str]:
    """ENTRYPOINT and CMD of the image."""
    steps = dict(dockerfile())  # The last of each counts.
    return json.loads(steps["ENTRYPOINT"]) + json.loads(steps["CMD"])
