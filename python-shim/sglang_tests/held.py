"""Keeps the saves or restores of a server in one state, so that something else can happen meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from engram_sglang._channel_layout import Decline, Drained, Filled, LookupResult, Saved, Want
from engram_sglang.restore import Restore, RestoreState
from engram_sglang.save import SaveState
from engram_sglang.seam import Room

# What the daemon says that ends a state, and after it.
_ANSWERS = {
    SaveState.OFFERED: (Want, Decline),
    SaveState.DRAINING: (Drained, Saved),
    SaveState.SETTLING: (Saved,),
    RestoreState.LOOKUP: (LookupResult,),
    RestoreState.FILLING: (Filled,),
}
# Long enough that nothing is given up while it is held.
PATIENCE = {"lookup_ms": 20_000, "restore_ms": 20_000, "hold_ms": 20_000, "save_ms": 20_000}


class Held:
    """Holds every machine of `world` that comes into `state` there. Answers of the daemon come late."""

    def __init__(self, world: Any, state: SaveState | RestoreState) -> None:
        self.world, self.state = world, state
        self.released = False
        self._late: list[Any] = []
        self._patch = pytest.MonkeyPatch()
        shim = world.shim
        if state in _ANSWERS:
            for answer in _ANSWERS[state]:
                self._patch.setitem(shim._handlers, answer, self._late.append)
        elif state is SaveState.GATHERING:
            # No room for KV: for a state, there is.
            take, state_bytes = shim._save_ports.take_room, shim.pools.state_bytes
            self._patch.setattr(shim._save_ports, "room", lambda: 0)
            self._patch.setattr(shim._save_ports, "take_room", lambda size: take(size) if size == state_bytes else None)
        elif state is RestoreState.LEASED:
            self._patch.setattr(Restore, "consider", lambda restore, ports, now: None)
        elif state is RestoreState.FILLED:
            self._patch.setattr(shim.tree, "room", lambda request: Room(0, 0, False))
        else:
            assert state is RestoreState.PLACED
            self._patch.setattr(Restore, "gate_open", property(lambda r: r.state is RestoreState.ENDED))

    def _states(self) -> list[SaveState | RestoreState]:
        shim = self.world.shim
        machines = shim.saves.values() if isinstance(self.state, SaveState) else shim.restores
        return [machine.state for machine in machines]

    def wait(self) -> None:
        """Goes on until a machine is in the state."""
        self.world.until(lambda: self.state in self._states(), what=self.state.value)

    def wait_for_all(self) -> None:
        """Goes on until all are."""
        self.world.until(lambda: set(self._states()) == {self.state}, what=f"all {self.state.value}")

    def release(self) -> None:
        """Lets go. What the daemon said meanwhile is heard now."""
        if self.released:
            return
        self.released = True
        self._patch.undo()
        shim = self.world.shim
        for message in self._late:
            shim._handlers[type(message)](message)
