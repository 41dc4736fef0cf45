"""A digest of the loaded weights, sampled where they lie.

Two servers with the same digest hold the same weights, as far as a sample can tell: of each parameter
and buffer its name, type, shape and 64 runs of bytes spread over it. Samples are joined on the device
and come to the host in one copy.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

_RUNS = 64
_RUN_BYTES = 64


def digest_of(model: Any) -> bytes:
    """32 bytes for a torch module. Waits for the device: never call it from a hook of the hot path."""
    named = list(model.named_parameters()) + list(model.named_buffers())
    description = hashlib.sha256(b"engram-weights-1")
    samples = []
    seen: set[tuple[int, tuple[int, ...], str]] = set()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype))
        description.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode())
        if tensor.numel() == 0 or tensor.device.type == "meta" or key in seen:
            continue
        seen.add(key)
        samples.append(_sample(tensor))
    for joined in _joined(samples):
        description.update(joined.cpu().numpy().tobytes())
    return description.digest()


def joint(digests: list[bytes]) -> bytes | None:
    """The digest of a server from those of its ranks, whose weights are parts of one model. None: one is not known."""
    if any(digest == bytes(32) for digest in digests):
        return None
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"engram-ranks-1" + b"".join(digests)).digest()


def _joined(samples: list[Any]) -> list[Any]:
    """One tensor for each device."""
    import torch

    devices: dict[str, list[Any]] = {}
    for sample in samples:
        devices.setdefault(str(sample.device), []).append(sample)
    return [torch.cat(parts) for _, parts in sorted(devices.items())]


def _sample(tensor: Any) -> Any:
    import torch

    if not tensor.is_contiguous():
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        if extent == tensor.numel():
            # Dense, in another order: the order that it has in memory.
            tensor = torch.as_strided(tensor, (extent,), (1,), tensor.storage_offset())
        else:
            tensor = tensor.contiguous()
    data = tensor.reshape(-1).view(torch.uint8)
    if data.numel() <= 2 * _RUNS * _RUN_BYTES:
        return data
    step = (data.numel() - _RUN_BYTES) // (_RUNS - 1)
    return torch.as_strided(data, (_RUNS, _RUN_BYTES), (step, 1), data.storage_offset()).reshape(-1)


def config_digest(config: Any) -> bytes:
    """32 bytes for a model's configuration, without what says nothing of its computation."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    elif not isinstance(config, dict):
        config = dict(vars(config))
    ignored = {"_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map"}
    plain = {str(key): value for key, value in config.items() if key not in ignored}
    text = json.dumps(plain, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(b"engram-config-1" + text.encode()).digest()
