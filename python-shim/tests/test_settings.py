"""Settings come from the environment, and a typo does not keep a server from starting."""

from __future__ import annotations

import logging
import re
from dataclasses import fields
from pathlib import Path

import pytest

from engram_sglang.settings import Settings


def test_defaults_without_any_variable() -> None:
    assert Settings.from_env({}) == Settings()


def test_units_and_words() -> None:
    got = Settings.from_env({"ENGRAM_RING_BYTES": "2 GiB", "ENGRAM_SAVE": "off", "ENGRAM_LOOKUP_MS": "70"})
    assert (got.ring_bytes, got.save, got.lookup_ms) == (2 << 30, False, 70)


@pytest.mark.parametrize("text", ["-1", "1.5", "many", "1 TiB", "0x10"])
def test_what_is_no_number_is_said_and_ignored(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert Settings.from_env({"ENGRAM_RING_BYTES": text}).ring_bytes == Settings.ring_bytes
    assert "ENGRAM_RING_BYTES" in caplog.text


def test_a_mode_that_there_is_not_is_said_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert Settings.from_env({"ENGRAM_MODE": "engine"}).mode == "engine"
    with caplog.at_level(logging.ERROR):
        assert Settings.from_env({"ENGRAM_MODE": "IPC"}).mode == "auto"
    assert "ENGRAM_MODE is not usable ('IPC' is none of auto, ipc, engine)" in caplog.text


def test_every_setting_is_in_the_readme() -> None:
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    told = set(re.findall(r"`(ENGRAM_[A-Z_]+)`", text))
    assert {"ENGRAM_" + field.name.upper() for field in fields(Settings)} <= told


def test_a_mistyped_name_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Settings.from_env({"ENGRAM_LOKUP_MS": "70", "ENGRAM_BIN": "x", "ENGRAM_PROBE_FILE": "y", "HOME": "/"})
    assert "ENGRAM_LOKUP_MS is no setting; ENGRAM_LOOKUP_MS is" in caplog.text
    assert len(caplog.records) == 1
