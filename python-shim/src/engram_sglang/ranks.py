"""The ranks of one server (attention tensor parallel), and the one way in which they talk to each other.

SGLang's schedulers of all ranks get the same requests and do the same in the same order. What a cache does must
be the same too, or their batches differ and their collectives hang. So everything of the shim that the tree or
the gate can feel is decided by one reduction, which all ranks enter in the same tick: see `lockstep`.

`minimum` and `gather` are collectives on SGLang's own CPU group: on the thread and at the places where SGLang
would make its own. A rank waits there for the schedulers of the others, never for a daemon.
"""

from __future__ import annotations

from typing import Any, Protocol


class Ranks(Protocol):
    """The ranks of one server."""

    size: int
    rank: int

    def minimum(self, numbers: list[int]) -> list[int]:
        """The smallest of all ranks at each place. All ranks give equally many numbers of 64 bits."""

    def gather(self, mine: bytes) -> list[bytes]:
        """What each rank gave, by rank. All ranks give equally many bytes."""


class Alone:
    """A server of one rank: nobody to ask."""

    size = 1
    rank = 0

    def minimum(self, numbers: list[int]) -> list[int]:
        return numbers

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]


class Group:
    """Ranks over one of SGLang's CPU groups (gloo)."""

    def __init__(self, group: Any) -> None:
        import torch

        self._torch, self._group = torch, group
        self.size = torch.distributed.get_world_size(group=group)
        self.rank = torch.distributed.get_rank(group=group)

    def minimum(self, numbers: list[int]) -> list[int]:
        torch = self._torch
        tensor = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return tensor.tolist()  # type: ignore[no-any-return]

    def gather(self, mine: bytes) -> list[bytes]:
        torch = self._torch
        tensor = torch.tensor(list(mine), dtype=torch.uint8)
        all_ = [torch.zeros_like(tensor) for _ in range(self.size)]
        torch.distributed.all_gather(all_, tensor, group=self._group)
        return [bytes(one.tolist()) for one in all_]


def of(ctx: Any) -> Ranks:
    """The ranks that share a tree's decisions. `ctx`: SGLang's TreeCacheBuildContext."""
    group = getattr(ctx.params, "attn_tp_cache_group", None)
    if group is None:
        group = getattr(ctx.params, "tp_cache_group", None)
    if group is None:
        return Alone()
    ranks = Group(group)
    return ranks if ranks.size > 1 else Alone()


def everyone(ctx: Any, ranks: Ranks) -> Ranks:
    """The ranks whose weights are parts of one model: with data-parallel attention more than share a tree.

    SGLang hands requests that are not for one rank alone to all of them in the same iteration; where it does not,
    `checks` refuses.
    """
    group = getattr(ctx.tp_group, "cpu_group", None)
    if not getattr(ctx.server_args, "enable_dp_attention", False) or group is None:
        return ranks
    all_ = Group(group)
    return all_ if all_.size > ranks.size else ranks
