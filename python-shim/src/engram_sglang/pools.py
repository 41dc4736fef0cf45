"""SGLang's pools as the daemon's geometry, and the packed form of a state and of a piece of KV.

A packed state is each state tensor in order, `[layers][bytes of one slot]`. A packed piece of KV is
`[layer][K|V][token][row]`. Both are what `packing = 1` names; nothing of the pool's place, layout, page size or
capacity is in them.

In the pools, K or V of a layer has one array of rows (*per layer*), or one in each page, beside those of all other
layers (*page-major*): row `t` is then row `t % page` of page `t // page`, and the pages of a layer are apart.

What to copy of pieces of KV is a table, as an array with a row for each piece: where it lies in the ring; how many tokens
it has there; how many of them to skip; the first of the index's rows to copy; and how many.

Copies are index operations of torch on byte views, so that any page size and any free list work alike
and no index is ever read back from the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

PACKING = 1

_DTYPES = {
    "torch.uint8": 1,
    "torch.float16": 2,
    "torch.bfloat16": 3,
    "torch.float32": 4,
    "torch.float8_e4m3fn": 5,
    "torch.float8_e5m2": 6,
}


class UnknownPool(Exception):
    """A pool, or its place in memory, is of a sort that cannot be saved."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state pool: bytes `[layers, slots, slot_bytes]`."""

    name: str
    dtype: int
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: Any
    slot_bytes: int


@dataclass(frozen=True)
class KvLayer:
    """K and V of one attention layer: bytes `[rows, row_bytes]` each; page-major, `[pages, page, row_bytes]`."""

    layer: int
    dtype: int
    heads: int
    k_head_dim: int
    v_head_dim: int
    k: Any
    v: Any


@dataclass
class Pools:
    """Everything of a worker that belongs to a prefix."""

    state: list[StateTensor]
    kv: list[KvLayer]
    page_size: int
    slots: int
    rows: int
    page_major: bool = False
    unknown: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state_bytes = sum(len(t.layers) * t.slot_bytes for t in self.state)
        self.row_bytes = sum(int(side.shape[-1]) for side in self.sides())
        shapes = {tuple(side.shape[:-1]) for side in self.sides()} or {()}
        if len(shapes) > 1:
            raise UnknownPool("attention layers of different lengths or layouts")
        shape = shapes.pop()
        self.page = int(shape[1]) if len(shape) == 2 else 0
        """Rows of a page, where the pages of a layer are apart; else 0."""
        self.mover: Any = None
        """Moves whole saves and restores at once, where there is such a thing: see `fused`."""

    def kv_bytes(self, tokens: int) -> int:
        """Packed size of the KV of so many tokens."""
        return tokens * self.row_bytes

    def gather_state(self, slot: Any, out: Any) -> None:
        """Slot `slot` (one index) -> `out`, `state_bytes` bytes."""
        import torch

        at = 0
        for tensor in self.state:
            size = len(tensor.layers) * tensor.slot_bytes
            if size:
                part = out[at : at + size].view(len(tensor.layers), 1, tensor.slot_bytes)
                torch.index_select(tensor.bytes, 1, slot, out=part)
            at += size

    def scatter_state(self, source: Any, slot: Any) -> None:
        """`source`, `state_bytes` bytes -> slot `slot` (one index)."""
        at = 0
        for tensor in self.state:
            size = len(tensor.layers) * tensor.slot_bytes
            if size:
                part = source[at : at + size].view(len(tensor.layers), 1, tensor.slot_bytes)
                tensor.bytes.index_copy_(1, slot, part)
            at += size

    def gather_kv(self, rows: Any, out: Any) -> None:
        """Rows `rows`, in order -> `out`, a packed piece of as many tokens."""
        import torch

        count, at = rows.shape[0], 0
        place = (rows // self.page, rows % self.page) if self.page else None
        for side in self.sides():
            size = count * side.shape[-1]
            part = out[at : at + size].view(count, side.shape[-1])
            if place is None:
                torch.index_select(side, 0, rows, out=part)
            else:
                part.copy_(side[place])
            at += size

    def scatter_kv(self, source: Any, tokens: int, first: int, rows: Any) -> None:
        """Tokens `first`, `first` + 1, … of a packed piece of `tokens` tokens -> rows `rows`."""
        count, at = rows.shape[0], 0
        place = (rows // self.page, rows % self.page) if self.page else None
        for side in self.sides():
            size = tokens * side.shape[-1]
            part = source[at : at + size].view(tokens, side.shape[-1])[first : first + count]
            if place is None:
                side.index_copy_(0, rows, part)
            else:
                side[place] = part
            at += size

    def save_state(self, slot: Any, ring: Any, block: int) -> None:
        """Slot `slot` -> `state_bytes` bytes of the ring at `block`."""
        if self.mover is not None:
            self.mover.state(ring, slot, block, True)
        else:
            self.gather_state(slot, ring[block : block + self.state_bytes])

    def save_kv(self, rows: Any, ring: Any, table: Any) -> None:
        """Whole pieces of KV, each with its rows, -> the ring."""
        if self.mover is not None:
            self.mover.kv(ring, rows, table, True)
            return
        for block, _, _, first, count in table.tolist():
            self.gather_kv(rows[first : first + count], ring[block : block + self.kv_bytes(count)])

    def restore_state(self, ring: Any, block: int, slot: Any) -> None:
        """`state_bytes` bytes of the ring at `block` -> slot `slot`."""
        if self.mover is not None:
            self.mover.state(ring, slot, block, False)
        else:
            self.scatter_state(ring[block : block + self.state_bytes], slot)

    def restore_kv(self, ring: Any, table: Any, rows: Any) -> None:
        """Pieces of KV in the ring, or parts of them, -> their rows."""
        if self.mover is not None:
            self.mover.kv(ring, rows, table, False)
            return
        for block, tokens, skip, first, count in table.tolist():
            source = ring[block : block + self.kv_bytes(tokens)]
            self.scatter_kv(source, tokens, skip, rows[first : first + count])

    def sides(self) -> Any:
        """K and V of each attention layer, in the order in which they are packed."""
        for layer in self.kv:
            yield layer.k
            if layer.v is not None:
                yield layer.v


def dtype_of(dtype: Any) -> int:
    """The protocol's number. Raises UnknownPool."""
    known = _DTYPES.get(str(dtype))
    if known is None:
        raise UnknownPool(f"element type {dtype}")
    return known


def byte_view(tensor: Any, keep: int, what: str) -> Any:
    """`tensor` as bytes with its first `keep` dimensions and one of bytes, over the same memory.

    Raises UnknownPool if the bytes of one element of the first dimensions do not lie together.
    """
    import torch

    if tensor.numel() == 0:
        return torch.empty((*tensor.shape[:keep], 0), dtype=torch.uint8, device=tensor.device)
    step = 1
    for size, stride in zip(reversed(tensor.shape[keep:]), reversed(tensor.stride()[keep:])):
        if size != 1 and stride != step:
            raise UnknownPool(f"{what}: the bytes of one entry do not lie together")
        step *= size
    width = tensor.element_size()
    flat = torch.as_strided(
        tensor, (*tensor.shape[:keep], step), (*tensor.stride()[:keep], 1), tensor.storage_offset()
    )
    return flat if width == 1 and flat.dtype == torch.uint8 else flat.view(torch.uint8)


def describe(mamba_pool: Any, kvcache: Any, page_size: int) -> Pools:
    """The pools of a hybrid model. Raises UnknownPool."""
    unknown: list[str] = []
    cache = mamba_pool.mamba_cache
    scratch = getattr(mamba_pool, "_NON_TRANSFER_STATE_FIELDS", frozenset())
    for name, value in vars(cache).items():
        if name in ("conv", "temporal") or name in scratch or value is None:
            continue
        unknown.append(f"state field {name}")
    if getattr(mamba_pool, "_slot_siblings", None):
        unknown.append("state beside the state pool")
    layers = tuple(int(layer) for layer in mamba_pool.mamba_layer_ids)
    state = []
    named = [(f"conv.{i}", tensor) for i, tensor in enumerate(cache.conv)] + [("temporal", cache.temporal)]
    for name, tensor in named:
        if tensor is None:
            continue
        view = byte_view(tensor, 2, name)
        shape = tuple(int(n) for n in tensor.shape[2:])
        state.append(StateTensor(name, dtype_of(tensor.dtype), layers, shape, view, int(view.shape[2])))
    pool = kvcache.full_kv_pool
    kv = []
    for layer, dense in sorted(kvcache.full_attention_layer_id_mapping.items()):
        kv.append(_kv_layer(pool, int(layer), dense, page_size))
    rows = math.prod(kv[0].k.shape[:-1]) if kv else int(getattr(pool, "size", 0)) + page_size
    return Pools(
        state=state,
        kv=kv,
        page_size=page_size,
        slots=int(mamba_pool.size) + 1,
        rows=rows,
        page_major=getattr(mamba_pool, "_raw", None) is not None or any(one.k.dim() == 3 for one in kv),
        unknown=unknown,
    )


def _kv_layer(pool: Any, layer: int, dense: int, page_size: int) -> KvLayer:
    dtype = dtype_of(pool.dtype)
    if hasattr(pool, "k_buffer"):
        k, v = pool.k_buffer[dense], pool.v_buffer[dense]
        if k.dim() not in (3, 4) or k.shape[:-1] != v.shape[:-1]:
            raise UnknownPool(f"attention layer {layer}: K and V are not [rows or pages of rows, heads, head_dim]")
        if k.dim() == 4 and k.shape[1] != page_size:
            raise UnknownPool(f"attention layer {layer}: pages of {k.shape[1]} rows beside pages of {page_size}")
        keep = k.dim() - 2
        return KvLayer(
            layer, dtype, int(k.shape[-2]), int(k.shape[-1]), int(v.shape[-1]),
            byte_view(k, keep, f"K of layer {layer}"), byte_view(v, keep, f"V of layer {layer}"),
        )
    latent = pool.kv_buffer[dense]
    if latent.dim() != 3 or latent.shape[1] != 1:
        raise UnknownPool(f"attention layer {layer}: latent KV is not [rows, 1, width]")
    view = byte_view(latent, 1, f"latent KV of layer {layer}")
    return KvLayer(layer, dtype, 1, int(latent.shape[2]), 0, view, None)
