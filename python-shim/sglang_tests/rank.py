"""One rank of a server with two, as a process of its own: SGLang's classes as in the other tests, and a real
gloo group between the ranks. `test_ranks` starts two of these for each scenario.

As SGLang's schedulers do, the ranks go through the same iterations, and meet in each of them. What every rank did to
its tree, and when, is compared at the end: a difference would sooner or later hang a real server.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import random
import sys
import threading
import time
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oracle
from conftest import World
from engram_sglang import channel, link, plugin, talk
from engram_sglang import restores as restores_module
from engram_sglang import saves as saves_module
from engram_sglang._channel_layout import CloseReason, Drain, Want
from engram_sglang.ranks import Alone, Group
from engram_sglang.restore import RestoreState
from engram_sglang.save import Save, SaveState
from engram_sglang.seam import Room
from engram_sglang.settings import Settings
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_turns import words

MODE: dict[str, Any] = {"page_size": 64, "overlap": True, "lag": 2}


class Rank:
    """A world whose shim has another rank beside it."""

    def __init__(self, patch: pytest.MonkeyPatch, rank: int, target: str, port: int, seed: int, **how: Any) -> None:
        self.patch, self.rank, self.port, self.seed = patch, rank, port, seed
        self.meeting = dist.new_group(backend="gloo")
        # Ranks hold different parts of everything, but sample the same tokens.
        self.apart = how.pop("apart", False)
        pattern, salted = oracle.pattern, 0 if self.apart else 10_007 * rank
        patch.setattr(oracle, "pattern", lambda digests, salt, width: pattern(digests, salt + salted, width))
        defaults = {"daemon": target, "ring_bytes": 8 << 20, "retry_ms": 50, "lookup_ms": 20_000, "restore_ms": 20_000}
        settings = Settings(**{**defaults, **how.pop("settings", {})})
        self.w = w = World(settings=settings, armed=False, seed=seed, **{**MODE, **how})
        with torch.no_grad():
            w.model.bias.fill_(float(rank))
        self.group = group = dist.new_group(backend="gloo")
        ranks: Any = Alone() if self.apart else Group(group)
        w.shim = plugin.arm(
            w.tree, w.ctx, w.pools, settings, copier=w.copier, ranks=ranks, everyone=Group(group)
        )
        plugin._after_init(None, w.scheduler)
        w.scribble_taken(w.shim)
        self.shim = w.shim
        self.log: list[Any] = []
        self._watch()

    def _watch(self) -> None:
        """Notes what the shim does to the tree, with the iteration."""
        tree, w = self.shim.tree, self.w

        def noted(name: str, what: Callable[..., Any]) -> None:
            original = getattr(tree, name)

            def call(*args: Any) -> Any:
                result = original(*args)
                self.log.append((w.ticks, name, what(args, result)))
                return result

            setattr(tree, name, call)

        noted("lock_kv", lambda args, result: (args[0], result is None))
        noted("unlock", lambda args, result: None)
        noted("take", lambda args, result: (args[0], result is None))
        noted("insert", lambda args, result: (len(args[0]), args[1], result))
        noted("state_match", lambda args, result: (len(args[0]), result))
        noted("full_match", lambda args, result: (len(args[0]), result))
        run_batch = w.run_batch

        def batch(work: Any) -> Any:
            row = [(r.rid, len(r.output_ids), getattr(r, "prefix_len", None)) for r in work.reqs]
            self.log.append((w.ticks, str(work.forward_mode), row))
            return run_batch(work)

        w.run_batch = batch

    def close(self) -> None:
        """The server ends on all ranks, and the threads of their groups with it."""
        self.w.close()
        dist.barrier(group=self.meeting)
        for group in (self.group, self.meeting):
            dist.destroy_process_group(group)

    # --- The loop ---

    def step(self, mine: bool = True) -> bool:
        """One iteration of all ranks. True: all of them say so."""
        if not self.w.step():
            time.sleep(0.0005)
        flag = torch.tensor([int(mine)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.meeting)
        return bool(flag.item())

    def until(self, done: Callable[[], bool], what: str, seconds: float = 40.0) -> None:
        """Goes on until all ranks are `done()`."""
        end = time.monotonic() + seconds
        while not self.step(done()):
            assert time.monotonic() < end, f"rank {self.rank}: not within {seconds} s: {what}"

    def run(self, *requests: Any) -> None:
        self.until(lambda: all(r.finished() for r in requests), "requests")
        for _ in range(3 + self.w.lag):
            self.step()

    def settle(self) -> None:
        self.until(lambda: not self.shim.saves, "saves")

    def join(self) -> None:
        self.until(lambda: self.shim.joined, "both attached")

    def calm(self) -> None:
        """From here on nobody kills the daemon; all ranks are attached to the one that runs."""
        folder = pathlib.Path(sys.argv[2])
        if self.rank == 0:
            (folder / "calm").touch()
        self.until((folder / "calm.seen").exists, "calm")
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/status", timeout=30) as answer:
            boot = uuid.UUID(json.loads(answer.read())["boot"]).bytes

        def here() -> bool:
            session = self.shim.session
            return self.shim.joined and session is not None and session.end.boot == boot

        self.until(here, "both attached to the daemon that runs")

    def flush(self) -> None:
        self.until(lambda: not self.w.stream.work, "the device")
        self.w.flush()

    def all_say(self, mine: Any) -> list[Any]:
        """What each rank says."""
        both: list[Any] = [None, None]
        dist.all_gather_object(both, mine, group=self.meeting)
        return both

    def check(self) -> None:
        """SGLang's accounting, and that all ranks did the same."""
        self.settle()
        self.until(lambda: not self.shim.restores, "restores")
        self.w.check()
        if self.apart:
            return
        mine = [json.loads(json.dumps(self.log)), dict(self.w.admitted_prefix), self.w.ticks]
        both: list[Any] = [None, None]
        dist.all_gather_object(both, mine, group=self.meeting)
        first, second = both
        for a, b in zip(first[0], second[0]):
            assert a == b, f"the ranks went apart: {a} and {b}"
        assert first == second


def two_turns(r: Rank, expected: int, key: int = 0) -> None:
    """A turn, a flush, and the next turn: so many tokens come back."""
    prompt = words(r.seed + key, 700)
    first = r.w.request(prompt, new=8, rid=f"first-{key}", session=f"s{key}")
    r.run(first)
    r.settle()
    r.flush()
    more = prompt + list(first.output_ids) + words(r.seed + key + 1, 50)
    second = r.w.request(more, new=8, rid=f"second-{key}", session=f"s{key}")
    r.run(second)
    assert r.w.admitted_prefix[second.rid] == expected, (r.rank, r.w.admitted_prefix, dict(r.shim.counts))


def plain(r: Rank) -> None:
    r.join()
    two_turns(r, 640)
    assert r.shim.counts["tokens_reused"] == 640 and r.shim.counts["save_ok"] >= 1


def parts(r: Rank) -> None:
    """A prefix that is larger than the ring of each rank."""
    r.join()
    prompt = words(r.seed, 6000)
    r.run(r.w.request(prompt, new=4, rid="first"))
    r.settle()
    r.flush()
    r.run(r.w.request([*prompt, 1, 2, 3], new=4, rid="second"))
    assert r.w.admitted_prefix["second"] == 5952, (r.rank, r.w.admitted_prefix, dict(r.shim.counts))
    assert r.shim.counts["parts_restored"] >= 3 and r.shim.counts["restores_placed"] == 1
    # And when it ends in the middle on one of them.
    r.flush()
    move_on = r.shim.move_on

    def lost(restore: Any, runs: Any) -> Any:
        event = move_on(restore, runs)
        if r.rank == 1:
            r.shim._leave(CloseReason.FAILED)
        return event

    r.shim.move_on = lost
    r.run(r.w.request([*prompt, 1, 2, 3, 4], new=4, rid="third"))
    assert r.w.admitted_prefix["third"] == 0
    r.shim.move_on = move_on


def parts_of_one(r: Rank) -> None:
    """A prefix that fits into the ring of one rank only: both take rows before it is there."""
    leased = restores_module.Restore.leased
    if r.rank == 0:
        r.patch.setattr(
            restores_module.Restore, "leased", lambda self, *args: leased(self, *args[:5], True, *args[6:])
        )
    r.join()
    two_turns(r, 640)
    assert (r.shim.counts["parts_restored"] > 0) == (r.rank == 0)


class Late:
    """Messages of the daemon, each some time after it came."""

    def __init__(self, rx: Any, seconds: float) -> None:
        self._rx, self._seconds = rx, seconds
        self._waiting: deque[tuple[float, Any]] = deque()

    def pop(self) -> Any:
        while (message := self._rx.pop()) is not None:
            self._waiting.append((time.monotonic() + self._seconds, message))
        if self._waiting and self._waiting[0][0] <= time.monotonic():
            return self._waiting.popleft()[1]
        return None


def make_late(r: Rank, seconds: float) -> None:
    adopt = talk.Talk._adopt

    def late(self: Any) -> None:
        adopt(self)
        if self.session is not None:
            self.session.end.rx = Late(self.session.end.rx, seconds)

    r.patch.setattr(talk.Talk, "_adopt", late)


def late(r: Rank) -> None:
    """One rank hears everything half a second later."""
    if r.rank == 1:
        make_late(r, 0.5)
    r.join()
    two_turns(r, 640)
    assert r.shim.counts["save_ok"] >= 1


def missing_shard(r: Rank) -> None:
    """One rank never tells the daemon of a state."""
    tell = saves_module.Saves._tell_offer
    if r.rank == 1:
        r.patch.setattr(saves_module.Saves, "_tell_offer", lambda self, save: None)
    r.join()
    two_turns(r, 0)
    r.settle()
    assert r.shim.counts["save_ok"] == 0
    r.patch.setattr(saves_module.Saves, "_tell_offer", tell)
    # As soon as it does, all is well.
    r.flush()
    two_turns(r, 640, key=10)


def one_session(r: Rank) -> None:
    """One rank finds no daemon: neither saves nor restores."""
    r.until(lambda: r.rank == 1 or r.shim.session is not None, "one attached")
    two_turns(r, 0)
    assert r.shim.counts["offers"] == 0 and r.shim.counts["lookups"] == 0 and not r.shim.joined


def refused_by_one(r: Rank) -> None:
    """A rank whose daemon has no room for it declines, and the other one's save ends with it."""
    if r.rank == 1:
        r.patch.setattr(saves_module.Saves, "take_room_for_save", lambda self, size: None)
    r.join()
    two_turns(r, 0)
    r.settle()
    assert r.shim.counts["save_ok"] == 0


def boundaries(r: Rank) -> None:
    """One rank is granted less than the other: both take the smaller one."""
    r.join()
    prompt = words(r.seed, 700)
    # A shallow state first, so that the daemon has two.
    r.run(r.w.request(prompt[:400], new=4, rid="shallow"))
    r.settle()
    r.run(r.w.request(prompt, new=4, rid="deep"))
    r.settle()
    r.flush()
    ask, asked = restores_module.Restores._ask, []

    def shallow(self: Any, restore: Any) -> None:
        if r.rank == 1 and not restore.asked:
            asked.append(restore)
            restore.maximum = 448
        ask(self, restore)

    r.patch.setattr(restores_module.Restores, "_ask", shallow)
    r.run(r.w.request([*prompt, 1, 2, 3], new=4, rid="again"))
    assert r.w.admitted_prefix["again"] == 384, (r.rank, r.w.admitted_prefix, dict(r.shim.counts))
    assert r.rank == 0 or asked
    assert r.shim.counts["hits"] == (2 if r.rank == 0 else 1)


def less_kv(r: Rank) -> None:
    """The device loses KV while the ranks, which may ask for different depths at most, wait for room."""
    r.join()
    prompt = words(r.seed, 700)
    r.run(r.w.request(prompt[:400], new=4, rid="shallow"))
    deep = r.w.request(prompt, new=4, rid="deep")
    r.run(deep)
    # Keeps the KV of both on the device, when the states go.
    r.run(r.w.request(prompt[:640] + words(r.seed + 1, 300), new=4, rid="beside"))
    r.settle()
    r.w.evict_states()
    ask = restores_module.Restores._ask

    def shallow(self: Any, restore: Any) -> None:
        if r.rank == 1 and not restore.asked:
            restore.maximum = 448
        ask(self, restore)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restores_module.Restores, "_ask", shallow)
        patch.setattr(r.shim.tree, "room", lambda request: Room(0, 0, False))
        again = r.w.request([*prompt, 1, 2, 3], new=4, rid="again")
        restore = r.shim.restores[0]
        assert restore.device_kv == 640
        r.until(lambda: restore.state is RestoreState.FILLED and restore.boundary == 384, "both filled")
    r.w.tree.evict(EvictParams(num_tokens=r.w.tree.full_evictable_size()))
    r.run(again)
    assert restore.tries == 2 - r.rank, "it was not asked for anew"
    assert r.w.admitted_prefix["again"] == 384, (r.rank, r.w.admitted_prefix, dict(r.shim.counts))


def broken_daemon(r: Rank) -> None:
    """The daemon of one rank breaks the protocol in the middle of what both ranks decided."""
    r.join()
    wants: list[Any] = []
    handlers = r.shim._handlers
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(handlers, Want, wants.append)
        requests = [r.w.request(words(r.seed + key, 200), new=4, rid=f"b{key}") for key in range(2)]
        r.run(*requests)
        r.until(lambda: len(wants) == 2, "both are wanted")
    if r.rank == 1:
        tx = r.shim.session.end.tx
        push = tx.push

        def broken(message: Any) -> bool:
            if isinstance(message, Drain):
                raise channel.Broken("on purpose")
            return push(message)

        r.patch.setattr(tx, "push", broken)
    for want in wants:
        handlers[Want](want)
    begun: list[Any] = []
    step = Save.step

    def noted(self: Any, to: Any, now: float) -> None:
        step(self, to, now)
        if to is SaveState.GATHERING:
            begun.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "step", noted)
        r.step()
    assert len(begun) == 1, "one save begins a tick, on both ranks"
    r.settle()
    assert r.shim.counts["save_ok"] == 0
    r.join()
    two_turns(r, 640)


def fault(r: Rank) -> None:
    """Something unexpected on one rank, again and again: first all ends, then all ranks are off."""
    r.join()
    hear = talk.Talk._hear
    faults = [0]

    def broken(self: Any, session: Any) -> None:
        if self.saves and faults[0] < 3:
            faults[0] += 1
            raise RuntimeError("on purpose")
        hear(self, session)

    if r.rank == 1:
        r.patch.setattr(talk.Talk, "_hear", broken)
    sessions = []
    for key in range(3):
        r.until(lambda: r.shim.joined or r.shim.off, "both attached")
        sessions.append(r.shim.session)
        request = r.w.request(words(r.seed + key, 300), new=4, rid=f"f{key}")
        r.run(request)
        r.settle()
        assert r.shim.counts["save_ok"] == 0
    r.until(lambda: r.shim.off, "both off")
    assert all(session.left.is_set() for session in sessions if session is not None)
    r.until(lambda: r.shim.link.state == "closed", "no more tries")
    request = r.w.request(words(r.seed, 700), new=4, rid="last")
    r.run(request)


def asked_again(r: Rank) -> None:
    """The daemon asks for a state that both ranks have and one could not bring."""
    take = saves_module.Saves.take_room_for_save
    if r.rank == 1:
        r.patch.setattr(saves_module.Saves, "take_room_for_save", lambda self, size: None)
    r.join()
    request = r.w.request(words(r.seed, 700), new=2000, rid="long", session="talk")
    r.until(lambda: len(request.output_ids) > 3, "the prefill")
    r.settle()
    assert r.shim.counts["save_ok"] == 0
    r.patch.setattr(saves_module.Saves, "take_room_for_save", take)
    answers: list[Any] = []

    def ask() -> None:
        body = json.dumps({"conversation_id": "talk"}).encode()
        call = urllib.request.Request(
            f"http://127.0.0.1:{r.port}/save_snapshot", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=30) as answer:
            answers.append(json.loads(answer.read()))

    thread = threading.Thread(target=ask)
    if r.rank == 0:
        thread.start()
    r.until(lambda: r.rank == 1 or not thread.is_alive(), "the answer")
    assert r.rank == 1 or answers[0]["boundary"] >= 640, answers
    assert r.shim.counts["save_ok"] >= 1
    r.w.abort("long")
    r.run(request)
    r.flush()
    again = r.w.request(words(r.seed, 700), new=4, rid="again", session="talk")
    r.run(again)
    assert r.w.admitted_prefix["again"] == 640


def storm(r: Rank) -> None:
    """Small pools, many conversations, and each rank with troubles of its own: late answers, lost sessions."""
    own, same = random.Random(1000 * r.seed + r.rank), random.Random(r.seed)
    if r.rank == 1:
        make_late(r, 0.02)
    r.join()
    history: dict[int, list[int]] = {}
    counts = r.shim.counts

    def enough() -> bool:
        return counts["restores_placed"] > 5 and counts["save_ok"] > 10

    turn = 0
    # On a busy machine the ranks may be without a daemon for many turns.
    while turn < 36 or not r.step(enough()):
        assert turn < 500, dict(counts)
        turn += 1
        chosen = same.sample(range(8), 3)
        going = []
        for key in chosen:
            tokens = history.get(key) or words(r.seed + 31 * key, same.randrange(200, 500))
            tokens = tokens + words(r.seed + 1000 * turn + key, same.randrange(1, 90))
            request = r.w.request(tokens, new=same.randrange(2, 12), rid=f"t{turn}-{key}", session=f"c{key}")
            going.append((key, tokens, request))
        trouble = own.random() < 0.2

        def done(going: Any = going) -> bool:
            nonlocal trouble
            if trouble and own.random() < 0.05:
                trouble = False
                r.shim._leave(CloseReason.FAILED)
            return all(request.finished() for _, _, request in going)

        r.until(done, "requests")
        for key, tokens, request in going:
            history[key] = tokens + list(request.output_ids)
        if same.random() < 0.3:
            r.run()
            r.flush()
    r.calm()
    r.flush()
    two_turns(r, 640, key=99_000)
    assert counts["ranks_differ"] == 0 and enough(), dict(counts)


def apart(r: Rank) -> None:
    """Data-parallel attention: each rank has a tree of its own, over parts of the same weights."""
    shim, w = r.shim, r.w
    r.join()
    first, second = r.all_say(shim.link.weights.digest)
    assert first == second, "what one saves the other one finds"
    prompt = words(r.seed, 700)
    if r.rank == 0:
        r.run(w.request(prompt, new=4, rid="first"))
        r.settle()
    else:
        r.run()
        r.settle()
        again = w.request([*prompt, 1, 2], new=4, rid="again")
        w.run(again)
        assert w.admitted_prefix["again"] == 640, dict(shim.counts)
    r.all_say(None)
    # All of them hear of an update in the same iteration.
    w.update_weights(r.seed + 700_000)
    old = first
    first, second = r.all_say(shim.link.weights.digest)
    assert first == second != old and first is not None
    # One of them is off: nobody waits for it, and nobody takes a name for whole that is not.
    shim.off = r.rank == 1
    w.update_weights(r.seed + 800_000)
    assert r.rank == 1 or shim.link.weights.digest is None
    shim.off = False


SCENARIOS = {
    "apart": (apart, {"apart": True}),
    "plain": (plain, {}),
    "parts": (parts, {"rows": 16384, "settings": {"ring_bytes": 512 << 10}}),
    "parts_of_one": (parts_of_one, {}),
    "late": (late, {}),
    "missing_shard": (missing_shard, {"settings": {"save_ms": 500}}),
    "one_session": (one_session, {}),
    "refused_by_one": (refused_by_one, {}),
    "boundaries": (boundaries, {}),
    "less_kv": (less_kv, {}),
    "broken_daemon": (broken_daemon, {}),
    "fault": (fault, {}),
    "asked_again": (asked_again, {"rows": 16384}),
    "plain_engine": (plain, {"settings": {"mode": "engine"}}),
    "parts_engine": (parts, {"rows": 16384, "settings": {"ring_bytes": 512 << 10, "mode": "engine"}}),
    "storm": (storm, {"slots": 20, "rows": 4096, "settings": {"minimum_tokens": 1}}),
}


def play(name: str, rank: int, target: str, port: int, seed: int) -> None:
    """One scenario, from a new server to its end."""
    scenario, how = SCENARIOS[name]
    with pytest.MonkeyPatch.context() as patch:
        if name == "one_session" and rank == 1:
            patch.setattr(link.Link, "_attach_once", lambda self: "there is no daemon")
        r = Rank(patch, rank, target, port, seed, **{k: dict(v) if isinstance(v, dict) else v for k, v in how.items()})
        scenario(r)
        r.check()
        assert name == "fault" or r.shim.counts["faults"] == 0
        r.close()
        dist.barrier()


def main() -> None:
    """Plays scenarios as they are named on the input, one a line, and answers each with a line."""
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
    )
    answers, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, target, port, seed = json.loads(line)
        play(name, rank, target, port, seed)
        print("played", file=answers, flush=True)


if __name__ == "__main__":
    main()
