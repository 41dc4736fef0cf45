"""The shim by itself, over a real channel and with a clock of the test: what it tells, what it waits for, and its faults."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engram_sglang import requests as requests_module
from engram_sglang._channel_layout import CloseReason, Decline, DeclineReason, Finish, Lookup, LookupResult, Miss, Offer, Outcome, RequestClose, TurnFinished
from engram_sglang.channel import DaemonEnd, WorkerEnd
from engram_sglang.link import Beat, Link, Session, Weights
from engram_sglang.ring import RingSpace
from engram_sglang.seam import Ending, Names
from engram_sglang.settings import Settings
from engram_sglang.shim import Shim

ITERATION = 0.21
LONG = 131_072


class Told:
    """A shim without a server, and the daemon's end of its channel."""

    def __init__(self) -> None:
        self.time = 100.0
        self.daemon, fd = DaemonEnd.create(b"b" * 16, b"s" * 16)
        worker = WorkerEnd.open(fd, self.daemon.memory.size)
        self.bell = os.eventfd(0)
        settings = Settings(daemon="unix:///nonexistent", silence_ms=1_000_000)
        link = Link(settings, lambda ring: None, 1 << 16)
        link.weights = Weights(1, b"x" * 32)
        tree: Any = SimpleNamespace(page_size=64, load=Beat)
        pools: Any = SimpleNamespace(state_bytes=4096, row_bytes=64)
        tree.slot = lambda node: node
        copier: Any = SimpleNamespace(submit=lambda copy, before_next: SimpleNamespace(done=lambda: True))
        self.shim = Shim(settings, tree, pools, copier, link, clock=lambda: self.time)
        link._session = Session(worker, self.bell, SimpleNamespace(space=RingSpace(1 << 20), bytes=None), link.weights)
        for _ in range(3):
            self.tick()
        assert self.shim.joined

    def tick(self) -> list[Any]:
        """An iteration of a busy server; what the daemon heard by then."""
        self.time += ITERATION
        self.daemon.beat()
        self.shim.tick()
        heard = []
        while (message := self.daemon.rx.pop()) is not None:
            heard.append(message)
        return heard

    def enqueue(self, rid: str, count: int) -> Any:
        tokens = array("q", range(count))
        self.shim.enqueue(SimpleNamespace(), Names(rid, None, None, None, True), tokens, count - 64, 0, 0)
        return self.shim.requests[rid].restore


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """One piece of tokens in each hook and tick: as slow as it can be."""
    monkeypatch.setattr(requests_module, "_TELL_NS", 1)
    monkeypatch.setattr(requests_module, "_TELL_IN_TICK_NS", 1)
    made = Told()
    yield made
    made.shim.shutdown()
    os.close(made.bell)


def test_a_long_prompt_is_told_however_long_it_takes(told: Told) -> None:
    """A lookup is late from when it was asked on: not while other tokens than its own are told first."""
    restores = [told.enqueue(f"r{i}", LONG) for i in range(2)]
    asked: list[Lookup] = []
    for _ in range(int(9.5 / ITERATION)):
        asked += [message for message in told.tick() if isinstance(message, Lookup)]
    assert [lookup.req for lookup in asked] == [1, 2]
    assert asked[0].max_boundary == LONG - 64
    # And then nobody answers.
    assert [restore.outcome for restore in restores] == [Outcome.DEADLINE] * 2
    assert not told.shim.restores


def test_an_answer_is_late_from_the_question_on(told: Told) -> None:
    restore = told.enqueue("r", LONG)
    while restore.asked is None:
        told.tick()
    assert told.time - restore.since > 0.5
    told.tick()
    assert restore.outcome is None
    told.tick()
    told.tick()
    assert restore.outcome is Outcome.DEADLINE


def test_a_daemon_that_cannot_be_told_is_not_waited_for(told: Told) -> None:
    """It lives, and reads nothing: the channel is full."""
    session = told.shim.session
    assert session is not None
    tx = session.end.tx
    tx.push_tokens = lambda *args: 0  # type: ignore[method-assign]
    restore = told.enqueue("r", LONG)
    began = told.time
    while restore.outcome is None:
        told.tick()
        assert told.time < began + 11, "it waits for ever"
    assert restore.outcome is Outcome.DEADLINE and restore.asked is None


def test_a_hook_tells_what_there_is_time_for(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "_TELL_NS", 10_000_000_000)
    monkeypatch.setattr(requests_module, "_TELL_IN_TICK_NS", 10_000_000_000)
    restore = told.enqueue("r", LONG)
    assert restore.asked is not None and told.shim.requests["r"].sent == LONG


@pytest.mark.parametrize("idle", [True, False])
def test_a_miss_waits_for_those_that_came_with_it(told: Told, monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    """They are prefilled together; but not for long, and not for what came at another time."""
    monkeypatch.setattr(requests_module, "_TELL_NS", 10_000_000_000)
    told.shim.settings = replace(told.shim.settings, lookup_ms=1_000_000)
    told.shim.tree.is_idle = lambda: idle

    def answer(*rids: str) -> None:
        for rid in rids:
            restore = told.shim.requests[rid].restore
            miss = LookupResult(
                req=restore.request.number, attempt=restore.attempt, lease=0, boundary=0, kv_from=0, tier=None,
                reason=Miss.NOTHING_STORED, bytes=0, parts=[],
            )  # fmt: skip
            assert told.daemon.tx.push(miss)
        told.tick()

    def open_() -> list[str]:
        return [rid for rid in told.shim.requests if told.shim.may_admit(rid)]

    told.enqueue("alone", 1024)
    told.tick()
    for rid in "abc":
        told.enqueue(rid, 1024)
    answer("alone")
    assert open_() == ["alone"]
    answer("a", "b")
    assert open_() == ["alone"]
    answer("c")
    assert open_() == ["alone", "a", "b", "c"]

    for rid in "de":
        told.enqueue(rid, 1024)
    answer("d")
    waited = 1
    while "d" not in open_():
        told.tick()
        waited += 1
        assert waited < 40, "it waits for ever"
    assert "e" not in open_()
    assert waited == (17 if idle else 3)


def test_what_raises_for_one_machine_keeps_no_other_from_its_turn(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks do all that was agreed on."""
    restores = [told.enqueue(f"r{i}", 1024) for i in range(3)]
    acted = []

    def act(restore: Any, *numbers: int) -> None:
        acted.append(restore)
        if restore is restores[0]:
            raise RuntimeError("on purpose")

    monkeypatch.setattr(told.shim, "_act_on_restore", act)
    told.tick()
    assert acted == restores and told.shim.counts["faults"] == 1 and told.shim.session is None


def over(told: Told, rid: str, count: int, boundaries: list[tuple[int, bool]]) -> None:
    """A request that leaves states and ends, before anything of that could be told."""
    names, tokens, req = Names(rid, None, None, None, True), array("q", range(count)), SimpleNamespace()
    told.shim.enqueue(req, names, tokens, 0, 0, 0)
    for node, (boundary, branch) in enumerate(boundaries, 1):
        told.shim.inserted(req, names, tokens, boundary, node, branch)
    told.shim.finished(req, rid, tokens, Ending(count, count, 0, Finish.STOP))


def test_what_a_request_leaves_is_offered_before_it_is_closed(told: Told) -> None:
    """The daemon takes nothing of a request that is closed."""
    over(told, "r", LONG, [(LONG, False)])
    heard = [m for _ in range(40) for m in told.tick() if isinstance(m, (Offer, TurnFinished, RequestClose))]
    assert [type(m) for m in heard] == [Offer, TurnFinished, RequestClose]


def test_a_request_whose_branch_is_not_drained_is_closed_after_the_deeper_offer(told: Told) -> None:
    """A deeper state is not offered before the branch is drained; the request waits for both."""
    over(told, "r", 8192, [(4096, True), (8192, False)])
    heard = [m for _ in range(3) for m in told.tick() if isinstance(m, (Offer, RequestClose))]
    assert [(type(m), m.boundary) for m in heard] == [(Offer, 4096)]
    told.daemon.tx.push(Decline(heard[0].save, DeclineReason.ALREADY_STORED))
    heard = [m for _ in range(3) for m in told.tick() if isinstance(m, (Offer, RequestClose))]
    assert [type(m) for m in heard] == [Offer, RequestClose] and heard[0].boundary == 8192


def test_a_request_that_cannot_be_told_is_closed_in_the_end(told: Told) -> None:
    """Its save is late, and given up."""
    session = told.shim.session
    assert session is not None
    push = session.end.tx.push_tokens
    session.end.tx.push_tokens = lambda *args: 0  # type: ignore[method-assign]
    over(told, "r", 8192, [(8192, False)])
    began = told.time
    while told.shim.saves:
        told.tick()
        assert told.time < began + 6, "it waits for ever"
    session.end.tx.push_tokens = push  # type: ignore[method-assign]
    heard = [m for _ in range(3) for m in told.tick() if isinstance(m, (Offer, RequestClose))]
    assert [type(m) for m in heard] == [RequestClose] and not told.shim._closing


def test_what_is_not_said_when_the_session_ends_is_not_said_to_the_next(told: Told) -> None:
    over(told, "r", LONG, [(LONG, False)])
    assert told.shim._closing
    told.shim._leave(CloseReason.FAILED)
    assert not told.shim._closing
    told.tick()
    assert not told.shim.saves and not told.shim.requests
