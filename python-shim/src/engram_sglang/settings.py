"""Settings, read once from `ENGRAM_*` environment variables.

A value that cannot be understood is reported once in the log and its default is used: a typo must
not keep a server from starting.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

log = logging.getLogger(__name__)

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 1000, "MB": 10**6, "GB": 10**9}


_CHOICES = {"mode": ("auto", "ipc", "engine")}


@dataclass(frozen=True)
class Settings:
    """What can be set. The name of the variable is that of the field, in capitals, after `ENGRAM_`."""

    daemon: str = "unix:///run/engram/engram.sock"
    """Where the daemon's gRPC socket is: `unix:///path`, or `host:port` (then `token_file` is needed)."""
    token_file: str = ""
    """File with the token for a daemon that is reached over TCP."""
    ring_bytes: int = 512 << 20
    """Size of the staging ring; raised to four states where that is more. Units KiB, MiB, GiB."""
    mode: str = "auto"
    """Who copies between the ring and memory that the daemon reaches: `ipc` (the daemon, which opens the ring), `engine`
    (this process, by way of host memory of the ring's size), or `auto` (the daemon chooses)."""
    save: bool = True
    """Offer states to the daemon."""
    restore: bool = True
    """Ask the daemon for states."""
    minimum_tokens: int = 64
    """A restore must bring at least so many tokens more than the device has."""
    lookup_ms: int = 500
    """A lookup that is not answered in this time, from the question on, is a miss."""
    restore_ms: int = 10_000
    """A restore that takes longer from its first consideration on is given up: plain prefill."""
    hold_ms: int = 2_000
    """How long a restored state stays locked for a request that is not admitted."""
    save_ms: int = 5_000
    """A save without progress for so long is given up."""
    silence_ms: int = 3_000
    """A daemon whose beat stands still for so long is left; it is asked again later."""
    retry_ms: int = 1_000
    """Pause before the next try to attach; doubles up to 30 s."""
    tenant: str = ""
    """Part of the namespace of all requests of this server, where several share one daemon."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """The settings of this process."""
        values: dict[str, object] = {}
        known = {"ENGRAM_" + field.name.upper() for field in fields(cls)}
        for name in sorted(env):
            # Others are the daemon's, and of the tests.
            if name.startswith("ENGRAM_") and name not in known:
                for meant in difflib.get_close_matches(name, known, 1, 0.85):
                    log.warning("engram: %s is no setting; %s is", name, meant)
        for field in fields(cls):
            name = "ENGRAM_" + field.name.upper()
            text = env.get(name)
            if text is None or text == "":
                continue
            try:
                value = _parse(type(field.default), text)
                if field.name in _CHOICES and value not in _CHOICES[field.name]:
                    raise ValueError(f"{text!r} is none of {', '.join(_CHOICES[field.name])}")
                values[field.name] = value
            except ValueError as error:
                log.error("engram: %s is not usable (%s); using %r", name, error, field.default)
        return cls(**values)  # type: ignore[arg-type]


def _parse(kind: type, text: str) -> object:
    if kind is bool:
        word = text.strip().lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off"):
            return False
        raise ValueError("neither true nor false")
    if kind is int:
        return _number(text)
    return text


def _number(text: str) -> int:
    """A number of at least 0, with a unit of bytes or without."""
    text = text.strip().replace("_", "")
    digits = text.rstrip("KMGIBkmgib ")
    unit = text[len(digits) :].strip().upper()
    if unit not in _UNITS or not digits.strip().isdigit():
        raise ValueError(f"{text!r} is not a number with a unit of KiB, MiB, GiB, KB, MB or GB")
    return int(digits) * _UNITS[unit]
