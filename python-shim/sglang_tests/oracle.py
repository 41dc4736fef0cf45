"""A model whose every byte can be told from the tokens: what the pools must hold, whoever wrote it.

The state at a boundary and the KV row of a token are functions of all tokens before it (and of the
namespace and the weights). A forward checks that what it reads is that, and writes what follows. So a
byte of another conversation, of another boundary, or one copied too early, is found where a real model
would have computed with it.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix(state: int, token: int) -> int:
    """The running digest after one more token."""
    state = (state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ (state >> 29)


class Digests:
    """Running digests of token sequences, remembered."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._of: dict[str, list[int]] = {}

    def of(self, rid: str, tokens: array[int], upto: int) -> list[int]:
        """Digests of the prefixes of 0, 1, … `upto` tokens."""
        have = self._of.setdefault(rid, [self.seed])
        for i in range(len(have) - 1, upto):
            have.append(mix(have[i], tokens[i]))
        return have

    def fresh(self, tokens: array[int], upto: int) -> list[int]:
        """The same, not remembered."""
        out = [self.seed]
        for i in range(upto):
            out.append(mix(out[i], tokens[i]))
        return out


def pattern(digests: np.ndarray, salt: int, width: int) -> np.ndarray:
    """Bytes `[len(digests), width]`."""
    words = -(-width // 8)
    salted = (salt * 0x94D049BB133111EB) & _MASK
    base = digests.astype(np.uint64)[:, None] ^ np.uint64(salted)
    steps = (np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93))[None, :]
    with np.errstate(over="ignore"):
        mixed = (base + steps) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    return mixed.view(np.uint8).reshape(len(digests), words * 8)[:, :width]


def at(side: torch.Tensor, rows: torch.Tensor) -> Any:
    """Where rows are in K or V of a layer, whose pages may be apart."""
    return rows if side.dim() == 2 else (rows // side.shape[1], rows % side.shape[1])


class Bytes:
    """The pools as the oracle sees them."""

    def __init__(self, pools: Any) -> None:
        self.pools = pools

    def write_rows(self, rows: torch.Tensor, digests: list[int]) -> None:
        """KV of the tokens after which the digests are."""
        d = np.array(digests, dtype=np.uint64)
        for i, (side, width) in enumerate(self._sides()):
            side[at(side, rows)] = torch.from_numpy(pattern(d, 100 + i, width).copy())

    def wrong_rows(self, rows: torch.Tensor, digests: list[int]) -> int:
        """How many rows do not hold that."""
        d = np.array(digests, dtype=np.uint64)
        bad = np.zeros(len(d), dtype=bool)
        for i, (side, width) in enumerate(self._sides()):
            bad |= (side[at(side, rows)].numpy() != pattern(d, 100 + i, width)).any(axis=1)
        return int(bad.sum())

    def _sides(self) -> Any:
        for layer in self.pools.kv:
            yield layer.k, layer.k.shape[-1]
            if layer.v is not None:
                yield layer.v, layer.v.shape[-1]

    def write_state(self, slot: int, digest: int) -> None:
        """The state after which the digest is."""
        for salt, tensor, layer in self._states():
            tensor[layer, slot] = torch.from_numpy(
                pattern(np.array([digest], dtype=np.uint64), salt, tensor.shape[2])[0].copy()
            )

    def state_is(self, slot: int, digest: int) -> bool:
        """Whether the slot holds that."""
        d = np.array([digest], dtype=np.uint64)
        return all(
            (tensor[layer, slot].numpy() == pattern(d, salt, tensor.shape[2])[0]).all()
            for salt, tensor, layer in self._states()
        )

    def copy_state(self, source: int, target: int) -> None:
        """What the copy on write does."""
        for _, tensor, layer in self._states():
            tensor[layer, target] = tensor[layer, source]

    def scribble_state(self, slot: int) -> None:
        """Garbage, as a slot holds before its forward is through."""
        for _, tensor, layer in self._states():
            tensor[layer, slot] = 0xA5

    def scribble_rows(self, rows: torch.Tensor) -> None:
        """The same for rows."""
        for side, _ in self._sides():
            side[at(side, rows)] = 0x5A

    def _states(self) -> Any:
        for t, tensor in enumerate(self.pools.state):
            if tensor.slot_bytes == 0:
                continue
            for layer in range(len(tensor.layers)):
                yield 1000 + 64 * t + layer, tensor.bytes, layer
