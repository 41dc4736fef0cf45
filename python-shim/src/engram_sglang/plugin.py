"""SGLang's entry point: registers the cache backend `engram` and the few hooks that it needs.

`--radix-cache-backend engram` chooses it. Whatever speaks against attaching is found before anything is
changed, and gives SGLang's own cache and a message.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
import re
import zlib
from types import ModuleType
from typing import Any

from . import __version__, checks, refused
from . import ranks as ranks_module
from .copier import HostCopier
from .link import Link, Weights
from .pools import PACKING, Pools, UnknownPool, describe
from .ranks import Alone, Ranks
from .ring import HostRing
from .settings import Settings
from .shim import Shim
from .weights import config_digest, digest_of, joint

log = logging.getLogger(__name__)

BACKEND = "engram"

_caches: list[Any] = []


ADAPTERS = {"0.5.17": "adapter_0_5_17", "0.5.23": "adapter_0_5_23"}
"""The releases of SGLang that were tested."""


class UnknownRelease(Exception):
    """There is no adapter for the SGLang that is installed."""


def adapter() -> ModuleType:
    """The adapter of the installed SGLang. Raises UnknownRelease."""
    version = importlib.metadata.version("sglang")
    # A rebuild of a release (`.post1`, `+cu129`) has the release's code; the signatures are checked anyway.
    release = re.match(r"\d+\.\d+\.\d+(?=$|\.post|\+)", version)
    name = ADAPTERS.get(release[0]) if release else None
    if name is None:
        raise UnknownRelease(f"SGLang {version} is not one of the tested releases ({', '.join(ADAPTERS)})")
    return importlib.import_module(f".{name}", __package__)


def load() -> None:
    """Run by SGLang in each of its processes."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_radix_cache_backend(BACKEND, factory)
    try:
        chosen = adapter()
        problems = checks.signatures(chosen.SIGNATURES)
    except UnknownRelease as error:
        problems = [str(error)]
    except Exception as error:
        problems = [f"{type(error).__name__}: {error}"]
    if problems:
        # The factory says so, where it is used.
        _problems[:] = problems
        return
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", _after_init, HookType.AFTER)
    for target in chosen.WEIGHT_HOOKS["changing"]:
        HookRegistry.register(target, _weights_changing, HookType.BEFORE)
    for target in chosen.WEIGHT_HOOKS["changed"]:
        HookRegistry.register(target, _weights_changed, HookType.AFTER)
    for target in chosen.WEIGHT_HOOKS["came"]:
        HookRegistry.register(target, _weights_came, HookType.AFTER)
    for target, function, kind in getattr(chosen, "HOOKS", ()):
        HookRegistry.register(target, function, HookType[kind])


_problems: list[str] = []


def factory(ctx: Any) -> Any:
    """SGLang's way to ask for the cache. Falls back to SGLang's own."""
    from sglang.srt.mem_cache.registry import default_radix_cache_factory

    settings, ranks = Settings.from_env(), ranks_module.of(ctx)
    everyone = ranks_module.everyone(ctx, ranks)
    pools, why = _look(ctx)
    if not everyone.minimum([0 if why else 1])[0]:
        # All ranks or none.
        why = why or ["another rank of this server does not"]
        _tell_why(settings, ctx, ranks, "; ".join(why))
        log.warning("engram: not attaching, with SGLang's own cache instead: %s", "; ".join(why))
        return default_radix_cache_factory(ctx)
    assert pools is not None, "only what can be described has nothing against it"
    cache = adapter().build(ctx)
    try:
        arm(cache, ctx, pools, settings, ranks=ranks, everyone=everyone)
    except Exception as error:
        _tell_why(settings, ctx, ranks, f"{type(error).__name__}: {error}")
        cache.shim = None
        log.exception("engram: not attaching; the cache works as SGLang's own")
    return cache


def _look(ctx: Any) -> tuple[Pools | None, list[str]]:
    """The pools, and what speaks against attaching to them. Never raises: the other ranks wait for the answer."""
    try:
        if ctx.disable_radix_cache:
            return None, ["the radix cache is off"]
        if not ctx.is_hybrid_ssm:
            return None, ["the model has no recurrent state"]
        if ctx.is_hybrid_swa:
            return None, ["sliding windows beside states"]
        if why := list(_problems) or checks.refusals(ctx):
            return None, why
        params = ctx.params
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        pools = describe(params.req_to_token_pool.mamba_pool, kvcache, params.page_size)
        return pools, [f"unknown: {what}" for what in pools.unknown]
    except UnknownPool as error:
        return None, [str(error)]
    except Exception as error:
        return None, [f"the pools cannot be described ({type(error).__name__}: {error})"]


def arm(
    cache: Any, ctx: Any, pools: Pools, settings: Settings, copier: Any = None, ranks: Ranks | None = None,
    everyone: Ranks | None = None,
) -> Shim:  # fmt: skip
    """Gives the cache its shim, and starts looking for a daemon. On all ranks or on none.

    `ranks` share a tree, and so their decisions; `everyone` is the ranks whose weights are parts of one model.
    """
    ranks = ranks or Alone()
    everyone = everyone or ranks
    failure: Exception | None = None
    link: Link | None = None
    digest, agreed = bytes(32), zlib.crc32(repr(settings).encode()).to_bytes(4, "big")
    model = ctx.tp_worker.model_runner.model
    new_ring: Any = HostRing
    try:
        # All that may fail, before the ranks meet: from then on each one counts on the others.
        tree, fixed = adapter().Tree(cache), _description(ctx, pools, model, ranks)
        if copier is None:
            copier, new_ring = _copies(cache, ctx, pools)
        digest = digest_of(model)
        ring_bytes = max(settings.ring_bytes, 4 * pools.state_bytes, 2 * pools.kv_bytes(1024), 1 << 16)
        link = Link(settings, lambda request: request.MergeFrom(fixed), ring_bytes, new_ring)
        shim = Shim(settings, tree, pools, copier, link, ranks=ranks)
        shim.model = model
        shim.name_weights = functools.partial(_named, shim, everyone)
        shim.named_widely = everyone is not ranks
        link.prepare()
    except Exception as error:
        failure = error
    # Each rank gets here, whatever is wrong with it: the others wait.
    cards = everyone.gather(bytes([failure is None]) + agreed + digest)
    instances = ranks.gather(os.urandom(16))
    try:
        if failure is not None:
            raise failure
        if not all(card[0] for card in cards):
            raise RuntimeError("another rank of this server does not attach")
        if len({card[1:5] for card in cards}) > 1:
            raise RuntimeError("the ranks of this server have different settings")
    except Exception:
        if link is not None:
            link.stop()
        raise
    fixed.instance = instances[0]
    assert link is not None, "nothing failed"
    link.weights = Weights(1, joint([card[5:] for card in cards]))
    cache.shim = shim
    _caches[:] = [cache]
    link.start()
    return shim


def _description(ctx: Any, pools: Pools, model: Any, ranks: Ranks) -> Any:
    """What an AttachRequest says of this worker, but for its instance and its weights."""
    from ._pb.engram.v1 import engram_pb2 as pb

    config = getattr(ctx.model_config, "hf_config", None) or {}
    names = getattr(config, "architectures", None) or [type(model).__name__]
    return pb.AttachRequest(
        shard=pb.Shard(attn_tp_size=ranks.size, attn_tp_rank=ranks.rank),
        model=pb.ModelIdentity(
            architecture=str(names[0]),
            config_digest=config_digest(config),
            display_name=_model_name(ctx),
            packing=PACKING,
        ),
        state=[
            pb.StateTensor(name=t.name, dtype=t.dtype, layers=list(t.layers), shape=list(t.shape)) for t in pools.state
        ],
        kv=[
            pb.KvLayer(layer=k.layer, dtype=k.dtype, heads=k.heads, k_head_dim=k.k_head_dim, v_head_dim=k.v_head_dim)
            for k in pools.kv
        ],
        layout=pb.POOL_LAYOUT_PAGE_MAJOR if pools.page_major else pb.POOL_LAYOUT_PER_LAYER,
        page_size=pools.page_size,
        slots=pools.slots,
        rows=pools.rows,
        versions={"sglang": importlib.metadata.version("sglang"), "engram-sglang": __version__},
    )


def _model_name(ctx: Any) -> str:
    args = ctx.server_args
    return str(getattr(args, "served_model_name", None) or getattr(args, "model_path", ""))[-200:]


def _tell_why(settings: Settings, ctx: Any, ranks: Ranks, why: str) -> None:
    try:
        refused.tell(settings, why, _model_name(ctx), ranks.size, ranks.rank)
    except Exception:
        log.exception("engram: the daemon is not told why")


def _copies(cache: Any, ctx: Any, pools: Pools) -> tuple[Any, Any]:
    """Who copies, and what makes rings, where the pools are."""
    import torch

    device = torch.device(cache.token_to_kv_pool_allocator.device)
    if device.type == "cpu":
        return HostCopier(), HostRing
    if device.type != "cuda" or torch.version.cuda is None:
        raise NotImplementedError(f"pools on {device}")
    from .cuda import CudaCopier, CudaRing
    from .fused import Mover

    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    copier = CudaCopier(device, getattr(ctx.tp_worker.model_runner, "forward_stream", None))
    pools.mover = Mover(pools, device)
    with torch.cuda.stream(copier.side):
        pools.mover.warm()
    return copier, lambda size: CudaRing(size, device, copier.fence())


def _shim() -> Shim | None:
    return _caches[0].shim if _caches else None


def _after_init(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    cache = getattr(scheduler, "tree_cache", None)
    shim = getattr(cache, "shim", None)
    if shim is not None:
        shim.tree.bind(scheduler)


def _weights_changing(*args: Any, **kwargs: Any) -> None:
    shim = _shim()
    if shim is not None:
        shim.weights_change()


def _weights_came(result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    shim = _shim()
    if shim is not None and shim.named_widely:
        # There is no tick in which all of them could agree to do it later.
        _weights_changed(result, manager)
    elif shim is not None:
        shim.weights_came()


def _weights_changed(result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    shim = _shim()
    if shim is None or getattr(manager, "_session", None) is not None:
        return
    if shim.off and not shim.named_widely:
        return
    known = shim.name_weights()
    if known is not None:
        shim.weights_changed(known)


def _named(shim: Shim, everyone: Ranks) -> bytes | None:
    """The digest of the weights of now; None: it is not known on one of the ranks."""
    digest = bytes(32)
    try:
        # Those who share a tree go off together, but there may be others.
        if not shim.off:
            digest = digest_of(shim.model)
    except Exception:
        log.exception("engram: the new weights cannot be named; nothing is saved or restored until they are")
    # Each rank gets here: the others wait.
    return joint(everyone.gather(digest))
