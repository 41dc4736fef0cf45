"""The machines of the shim by themselves: whatever happens in whatever order, they hold what they may hold."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from engram_sglang._channel_layout import AbortReason, Outcome
from engram_sglang._channel_layout import Piece as Kind
from engram_sglang.restore import PieceOfRestore, Place, Restore, RestoreState
from engram_sglang.restores import _disjoint
from engram_sglang.ring import UNIT, RingSpace
from engram_sglang.save import Phase, PieceOfSave, Save, SaveState


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
        self.locked = 0
        self.events: list[FakeEvent] = []
        self.copies: dict[int, FakeEvent] = {}
        """The last copy into each block."""
        self.retired: list[tuple[int, FakeEvent]] = []
        self.lent: dict[tuple[Kind, int], int] = {}
        self.disowned: dict[tuple[Kind, int], int] = {}
        self.said: list[Any] = []
        self.leases = 0
        self.hold = 0

    def take_room(self, size: int) -> int | None:
        return None if self.rng.random() < 0.2 else self.space.take(size)

    def give_room(self, block: int) -> None:
        assert self.copies.get(block, _OVER).over, "room given back while a copy uses it"
        self.space.give(block)

    def retire(self, block: int, event: FakeEvent) -> None:
        assert not event.over
        self.retired.append((block, event))

    def lend(self, save: int, piece: PieceOfSave) -> bool:
        assert piece.event is None or piece.event.done(), "lent before it is whole"
        if self.rng.random() < 0.2:
            return False
        self.lent[(piece.kind, piece.index)] = piece.block
        return True

    def disown(self, save: int, piece: PieceOfSave) -> None:
        key = (piece.kind, piece.index)
        self.disowned[key] = self.lent.pop(key)

    def lock_kv(self, save: Save) -> bool:
        if self.rng.random() < 0.1:
            return False
        self.locked += 1
        return True

    def unlock_kv(self, save: Save) -> None:
        self.locked -= 1

    def gather_kv(self, save: Save, pieces: list[PieceOfSave]) -> FakeEvent:
        assert self.locked == 1, "gathered without a lock"
        self.events.append(FakeEvent())
        self.copies |= {piece.block: self.events[-1] for piece in pieces}
        return self.events[-1]

    def abort(self, save: int, reason: AbortReason) -> None:
        self.said.append(reason)

    def ask_fill(self, lease: int, piece: Any) -> bool:
        if self.rng.random() < 0.2:
            return False
        self.lent[(piece.kind, piece.index)] = piece.block
        return True

    def disown_fill(self, lease: int, piece: Any) -> None:
        self.disown(lease, piece)

    def release(self, lease: int, outcome: Outcome, reused: int) -> None:
        self.leases -= 1
        self.said.append(outcome)

    def place(self, restore: Restore) -> Place:
        place = self.rng.choice(list(Place))
        if place is Place.DONE:
            for piece in restore.pieces:
                self.space.give(piece.block)
            self.hold += 1
        return place

    def unhold(self, restore: Restore) -> None:
        self.hold -= 1


def finish_save(world: World) -> None:
    """All copies end and the daemon answers what it was lent."""
    for block, event in world.retired:
        event.over = True
        world.space.give(block)
    for block in world.disowned.values():
        world.space.give(block)
    assert world.space.taken == 0, "room in the ring was lost"
    assert world.locked == 0, "a lock was lost"


@pytest.mark.parametrize("seed", range(300))
def test_any_walk_of_a_save(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    event = FakeEvent()
    world.events.append(event)
    piece = PieceOfSave(Kind.STATE, 0, 64, 64, UNIT)
    piece.block, piece.phase, piece.event = world.space.take(UNIT), Phase.COPYING, event
    world.copies[piece.block] = event
    save = Save(1, None, 64, 7, False, piece, 0.0)
    save.told = True
    answered = False
    for now in range(60):
        if save.state is SaveState.ENDED:
            break
        assert world.locked == (save.state is SaveState.GATHERING)
        act = rng.random()
        if act < 0.3 and not answered:
            answered = True
            parts = [0, 64] if rng.random() < 0.5 else [0, 16, 16, 64]
            parts = parts if rng.random() < 0.8 else []
            save.wanted(rng.random() < 0.8, parts, [UNIT * 2] * (len(parts) // 2), now)
        elif act < 0.35 and save.want is not None:
            save.start(world, now)
        elif act < 0.4 and save.gathered:
            save.let_go(world, now)
        elif act < 0.5 and world.events:
            rng.choice(world.events).over = True
        elif act < 0.7 and world.lent:
            kind, index = rng.choice(list(world.lent))
            block = world.lent.pop((kind, index))
            world.lent[(kind, index)] = block
            if save.drained(kind, index, rng.random() < 0.9, world, now):
                world.lent.pop((kind, index), None)
        elif act < 0.73:
            save.fail(world, rng.choice([None, AbortReason.DEADLINE]), "test", now)
        elif act < 0.75:
            save.end(world, rng.choice([None, AbortReason.DEADLINE]), now)
        else:
            save.pump(world, now)
    save.end(world, AbortReason.SESSION_END, 99)
    finish_save(world)


@pytest.mark.parametrize("seed", range(300))
def test_any_walk_of_a_restore(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    restore = Restore(None, 0, 64, 0, 0, 0.0)
    for now in range(60):
        act = rng.random()
        if restore.state is RestoreState.ENDED:
            break
        assert restore.gate_open == (restore.state is RestoreState.PLACED)
        assert world.hold == (restore.state is RestoreState.PLACED)
        if act < 0.3 and restore.state is RestoreState.LOOKUP:
            world.leases += 1
            restore.leased(5, 64, 0, [0, 64], UNIT, [UNIT * 3], now)
        elif act < 0.5:
            restore.consider(world, now)
        elif act < 0.7 and world.lent:
            key = rng.choice(list(world.lent))
            block = world.lent[key]
            if restore.filled(*key, rng.random() < 0.9, world, now):
                world.lent.pop(key, None)
            del block
        elif act < 0.8 and restore.state is RestoreState.FILLED:
            if restore.try_place(world, now) is Place.LESS_KV:
                restore.ask_again(world, Outcome.ABORTED, 1, now)
        elif act < 0.81:
            restore.fail(world, Outcome.ABORTED)
        elif act < 0.83:
            restore.end(world, Outcome.ABORTED, now)
        else:
            restore.pump(world, now)
    restore.end(world, Outcome.SESSION_END, 99)
    for block in world.disowned.values():
        world.space.give(block)
    assert world.space.taken == 0, "room in the ring was lost"
    assert world.hold == 0 and world.leases == 0


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
def test_of_pieces_that_overlap_the_later_one_counts(seed: int) -> None:
    rng = random.Random(seed)
    starts = sorted(rng.randrange(40) for _ in range(rng.randrange(1, 8)))
    pieces = [PieceOfRestore(Kind.KV, i, a, a + rng.randrange(1, 20), 1) for i, a in enumerate(starts)]
    start, end = rng.randrange(20), rng.randrange(20, 60)
    wanted: dict[int, int] = {}
    for piece in pieces:
        for token in range(max(start, piece.start), min(end, piece.end)):
            wanted[token] = piece.index
    found: dict[int, int] = {}
    for piece, first, last in _disjoint(pieces, start, end):
        assert piece.start <= first < last <= piece.end
        for token in range(first, last):
            assert token not in found, "taken twice"
            found[token] = piece.index
    assert found == wanted
