"""The machines of the shim by themselves: whatever happens in whatever order, they hold what they may hold."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import pytest

from engram_sglang._channel_layout import AbortReason, Outcome
from engram_sglang._channel_layout import Piece as Kind
from engram_sglang.channel import Broken
from engram_sglang.pieces import Loans, Parts, Run
from engram_sglang.restore import Place, Restore, RestoreState, Stock
from engram_sglang.ring import UNIT, RingSpace
from engram_sglang.save import Save, SaveState


class FakeEvent:
    """A copy that is over when the test says so."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over


_OVER = FakeEvent()
_OVER.over = True


class World:
    """Ports of both machines over a small ring; whatever is wrong is an assertion."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.space = RingSpace(16 * UNIT)
        self.events: list[FakeEvent] = []
        self.copies: dict[int, FakeEvent] = {}
        """The last copy into each block."""
        self.retired: list[tuple[int, FakeEvent]] = []
        self.lent: list[Run] = []
        self.disowned = Loans()
        self.stocks = 0
        self.said: list[Any] = []
        self.leases = 0
        self.leases_ever = 0
        self.hold = 0
        self.engine = rng.random() < 0.5
        """What comes is in a window first."""
        self.carried: list[tuple[int, int]] = []

    def carries(self) -> bool:
        return self.engine

    def bring(self, places: list[tuple[int, int]]) -> FakeEvent:
        assert self.engine and places
        self.events.append(FakeEvent())
        blocks = [run.block for run in self.lent]
        for start, size in places:
            assert start % UNIT == 0 and 0 < size and start + size <= self.space.size
            # The room that it is in.
            self.copies[max(block for block in blocks if block <= start)] = self.events[-1]
        self.carried += places
        return self.events[-1]

    def take_room(self, size: int) -> int | None:
        return None if self.rng.random() < 0.2 else self.space.take(size)

    def give_room(self, block: int) -> None:
        assert self.copies.get(block, _OVER).over, "room given back while a copy uses it"
        self.space.give(block)

    def let_go(self, run: Run) -> None:
        """The daemon answered for all of a run that nobody waits for."""
        if run.is_idle:
            self.give_room(run.block)
        else:
            self.retire(run.block, run.event)

    def room(self) -> int:
        return min(self.space.largest, 4 * UNIT)

    def restore_waits(self) -> bool:
        return self.rng.random() < 0.3

    def retire(self, block: int, event: FakeEvent) -> None:
        assert not event.over
        self.retired.append((block, event))

    def lend(self, save: int, run: Run) -> bool:
        assert run.event is None or run.event.done(), "lent before it is whole"
        return self.ask_fill(save, run)

    def disown(self, save: int, run: Run) -> None:
        assert run in self.lent
        self.disowned.add(save, run)

    def answers(self) -> list[tuple[Kind, int, int]]:
        """What the daemon may answer next: some of a run, or all of several that follow each other."""
        found = []
        for run in self.lent:
            open_ = [i for i in range(run.count) if run.open >> i & 1]
            if open_:
                count = 1
                while count < len(open_) and open_[count] == open_[0] + count and self.rng.random() < 0.7:
                    count += 1
                found.append((run.kind, run.index + open_[0], count))
        return found

    def gather_kv(self, save: Save, runs: list[Run]) -> FakeEvent | None:
        assert save.state is SaveState.GATHERING, "gathered outside of its state"
        if self.rng.random() < 0.05:
            return None
        self.events.append(FakeEvent())
        self.copies |= {run.block: self.events[-1] for run in runs}
        return self.events[-1]

    def abort(self, save: int, reason: AbortReason) -> None:
        self.said.append(reason)

    def ask_fill(self, lease: int, run: Run) -> bool:
        if self.rng.random() < 0.2:
            return False
        self.lent.append(run)
        return True

    def disown_fill(self, lease: int, run: Run) -> None:
        self.disown(lease, run)

    def move_on(self, restore: Restore, runs: list[Run]) -> FakeEvent:
        assert restore.stock is not None and all(run.is_answered and run.is_here for run in runs)
        self.events.append(FakeEvent())
        self.copies |= {run.block: self.events[-1] for run in runs}
        return self.events[-1]

    def take_stock(self, restore: Restore) -> None:
        restore.stock = Stock(0, None, None, None)
        self.stocks += 1

    def give_stock(self, restore: Restore) -> None:
        self.stocks -= restore.stock is not None
        restore.stock = None

    def release(self, lease: int, outcome: Outcome, reused: int) -> None:
        self.leases -= 1
        self.said.append(outcome)

    def place(self, restore: Restore) -> Place:
        place = self.rng.choice(list(Place))
        if place is Place.DONE:
            for run in restore.runs:
                assert run.is_answered and run.is_here
                self.give_room(run.block)
            self.give_stock(restore)
            self.hold += 1
        return place

    def unhold(self, restore: Restore) -> None:
        self.hold -= 1


def finish(world: World, number: int) -> None:
    """All copies end and the daemon answers what it was lent."""
    for block, event in world.retired:
        event.over = True
        world.space.give(block)
    for _ in range(99):
        # As far as it answered before, there is less to answer now.
        for kind, index, count in world.answers():
            with contextlib.suppress(Broken):
                for run in world.disowned.answer(number, kind, index, count)[1]:
                    world.space.give(run.block)
    assert world.space.taken == 0, "room in the ring was lost"
    assert world.stocks == 0, "rows were lost"


def a_want(rng: random.Random) -> Parts:
    """No KV, some, or more than the ring has room for."""
    ends = sorted(rng.sample(range(1, 600), rng.choice([0, 1, 2, 9, 40])))
    pairs = [number for a, b in zip([0, *ends], ends) for number in (a, b)]
    return Parts(pairs, UNIT // 16)


@pytest.mark.parametrize("seed", range(300))
def test_any_walk_of_a_save(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    event = FakeEvent()
    world.events.append(event)
    save = Save(1, None, 600, 7, False, 0.0)
    block = world.space.take(UNIT)
    assert block is not None
    save.runs.append(Run(Kind.STATE, 0, 1, block, UNIT))
    save.runs[0].event = event
    world.copies[block] = event
    save.told = True
    for now in range(200):
        if save.state is SaveState.ENDED:
            break
        act = rng.random()
        if act < 0.3 and save.wants is None:
            save.wanted(rng.random() < 0.8, a_want(rng), now)
        elif act < 0.35 and save.wants is not None:
            save.start(world, now)
        elif act < 0.5 and world.events:
            rng.choice(world.events).over = True
        elif act < 0.7 and world.answers():
            kind, index, count = rng.choice(world.answers())
            found, free = world.disowned.answer(1, kind, index, count)
            for run in free:
                world.let_go(run)
            found += save.drained(kind, index, count, rng.random() < 0.95, world, now)
            assert found == count
        elif act < 0.71:
            save.fail(world, rng.choice([None, AbortReason.DEADLINE]), "test", now)
        elif act < 0.72:
            save.end(world, rng.choice([None, AbortReason.DEADLINE]), now)
        else:
            save.pump(world, now)
    save.end(world, AbortReason.SESSION_END, 99)
    finish(world, 1)


@pytest.mark.parametrize("seed", range(400))
def test_any_walk_of_a_restore(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    restore = Restore(None, 0, 600, 0, 0, 0.0)
    for now in range(300):
        act = rng.random()
        if restore.state is RestoreState.ENDED:
            break
        assert restore.gate_open == (restore.state is RestoreState.PLACED)
        assert world.hold == (restore.state is RestoreState.PLACED)
        if act < 0.3 and restore.state is RestoreState.LOOKUP and restore.failed is None:
            world.leases += 1
            world.leases_ever += 1
            parts = a_want(rng)
            streams = UNIT + parts.offsets[-1] > world.space.size
            restore.leased(world.leases_ever, 600, 0, UNIT, parts, streams, now)
        elif act < 0.5:
            restore.consider(world, now)
        elif act < 0.6 and restore.ballot[0] == 3:
            world.take_stock(restore)
        elif act < 0.75 and world.answers():
            kind, index, count = rng.choice(world.answers())
            for lease in range(world.leases_ever + 1):
                for run in world.disowned.answer(lease, kind, index, count)[1]:
                    world.let_go(run)
            restore.filled(kind, index, count, rng.random() < 0.97, world, now)
        elif act < 0.8 and restore.state is RestoreState.FILLED:
            assert restore.streams == (restore.stock is not None)
            if restore.try_place(world, now) is Place.LESS_KV:
                restore.ask_again(world, Outcome.ABORTED, 1, now)
                # Answers to an earlier lease name that lease.
                break
        elif act < 0.805:
            restore.fail(world, Outcome.ABORTED)
        elif act < 0.81:
            restore.end(world, Outcome.ABORTED, now)
        elif act < 0.85 and world.retired:
            block, event = world.retired.pop()
            event.over = True
            world.space.give(block)
        else:
            restore.pump(world, now)
    restore.end(world, Outcome.SESSION_END, 99)
    finish(world, world.leases_ever)
    assert world.hold == 0 and world.leases == 0


def test_a_prefix_larger_than_the_ring_comes_in_parts() -> None:
    class Always(random.Random):
        def random(self) -> float:
            return 1.0

    world = World(Always())
    parts = Parts([number for i in range(50) for number in (i * 32, i * 32 + 32)], UNIT // 16)
    restore = Restore(None, 0, 1600, 0, 0, 0.0)
    world.leases = 1
    restore.leased(1, 1600, 0, UNIT, parts, True, 0)
    restore.consider(world, 0)
    assert world.space.taken == 0 and restore.ballot == (3, 1600), "rows come first"
    world.take_stock(restore)
    most, moved = 0, 0
    for now in range(1000):
        restore.pump(world, now)
        most = max(most, world.space.size - world.space.free_bytes)
        while world.retired:
            block, event = world.retired.pop()
            event.over = True
            world.space.give(block)
            moved += 1
        if restore.state is RestoreState.FILLED:
            break
        for kind, index, count in world.answers():
            assert restore.filled(kind, index, count, True, world, now) == count
    assert restore.ballot == (6, 1600)
    assert most <= world.space.size and moved >= 100 * UNIT / world.space.size
    assert [run.kind for run in restore.runs] == [Kind.STATE], "the rest moved on"
    restore.end(world, Outcome.ABORTED, 0)
    finish(world, 1)


def test_an_answer_that_cannot_be_is_refused() -> None:
    run = Run(Kind.KV, 3, 4, 0, UNIT)
    with pytest.raises(Broken):
        run.answer(Kind.KV, 3, 1)
    run.lent = True
    assert run.answer(Kind.STATE, 3, 1) == 0 and run.answer(Kind.KV, 0, 3) == 0 and run.answer(Kind.KV, 7, 9) == 0
    assert run.answer(Kind.KV, 0, 5) == 2
    with pytest.raises(Broken):
        run.answer(Kind.KV, 4, 1)
    with pytest.raises(Broken):
        run.answer(Kind.KV, 0, 2**32 - 1)
    assert run.answer(Kind.KV, 5, 2**32 - 1) == 2 and run.is_answered


def test_every_state_but_the_last_can_end() -> None:
    for kind, states in ((Save, SaveState), (Restore, RestoreState)):
        for state in states:
            machine: Any = object.__new__(kind)
            machine.state = state
            if state.value == "ended":
                with pytest.raises(RuntimeError):
                    machine.step(state, 0.0)
            else:
                machine.step(states.ENDED, 0.0)
                assert machine.state is states.ENDED


def test_room_is_given_out_once_and_joined_again() -> None:
    rng = random.Random(5)
    space = RingSpace(1 << 20)
    taken: dict[int, int] = {}
    seen: Counter[str] = Counter()
    for _ in range(5000):
        if taken and rng.random() < 0.5:
            start = rng.choice(list(taken))
            del taken[start]
            space.give(start)
        else:
            size = rng.randrange(1, 80_000)
            start_or_none = space.take(size)
            if start_or_none is None:
                seen["full"] += 1
                continue
            for other, length in taken.items():
                assert start_or_none + size <= other or other + length <= start_or_none
            assert start_or_none % UNIT == 0 and start_or_none + size <= space.size
            taken[start_or_none] = size
    for start in taken:
        space.give(start)
    assert seen["full"] and space.free_bytes == space.size
    assert space.take(space.size) == 0, "what was given back is whole again"
    with pytest.raises(KeyError):
        space.give(UNIT)


@pytest.mark.parametrize("seed", range(200))
def test_each_token_is_taken_once_from_the_last_piece_that_brings_it(seed: int) -> None:
    rng = random.Random(seed)
    pairs, at = [], 0
    for _ in range(rng.randrange(1, 8)):
        pairs += [at, at + rng.randrange(1, 20)]
        at = rng.randrange(at, pairs[-1] + 1)
    end = pairs[-1] - rng.randrange(pairs[-1] - pairs[-2])
    start = rng.randrange(end)
    parts = Parts(pairs, UNIT // 4)
    assert parts.cover(start, end)
    cut = rng.randrange(parts.count)
    runs = [Run(Kind.KV, 0, cut, 5 * UNIT, 0), Run(Kind.KV, cut, parts.count - cut, 900 * UNIT, 0)]
    found: dict[int, tuple[int, int]] = {}
    base = rng.randrange(start + 1)
    for run in [run for run in runs if run.count]:
        for block, tokens, skip, first, count in parts.table(run, start, end, base).tolist():
            assert 0 <= skip and skip + count <= tokens and count > 0
            for i in range(count):
                assert first + i not in found, "taken twice"
                found[first + i] = (block, skip + i)
    wanted: dict[int, tuple[int, int]] = {}
    for run in runs:
        block = run.block
        for i in range(run.index, run.index + run.count):
            a, b = pairs[2 * i], pairs[2 * i + 1]
            for token in range(max(a, start), min(b, end)):
                wanted[token - base] = (block, token - a)
            block += -(-(b - a) * (UNIT // 4) // UNIT) * UNIT
    assert found == wanted


def test_pieces_that_cannot_be_are_found() -> None:
    assert Parts([], 8).cover(5, 5) and not Parts([], 8).cover(4, 5)
    for pairs in ([0, 4, 5, 9], [0, 4, 4, 4], [0, 4, 6, 5], [2, 9], [0, 8], [3, 9, 0, 4], [0, 9, 2, 4]):
        assert not Parts(pairs, 8).cover(0, 9), pairs
    assert Parts([0, 4, 4, 9], 8).follow(9)
    for pairs in ([0, 10], [4, 4], [5, 4], [0, 5, 4, 9], [4, 9, 0, 4]):
        assert not Parts(pairs, 8).follow(9), pairs
    with pytest.raises(ValueError):
        Parts([0, 4, 4], 8)


def test_a_run_is_as_long_as_there_is_room() -> None:
    parts = Parts([0, 1, 1, 3, 3, 6, 6, 7], UNIT)
    assert [parts.fit(0, room * UNIT) for room in range(9)] == [0, 1, 1, 2, 2, 2, 3, 4, 4]
    assert parts.fit(1, 5 * UNIT - 1) == 1 and parts.fit(3, UNIT) == 1
    assert parts.room(0, 4) == 7 * UNIT and parts.room(1, 2) == 5 * UNIT
    assert Parts([0, 1, 1, 2], 100).room(0, 2) == UNIT + 100
