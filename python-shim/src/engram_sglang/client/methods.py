"""How what builds a request becomes a method of both clients, with its parameters and its words."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def as_method(method: F, build: Callable[..., Any]) -> F:
    """With the name, the words and the parameters of what builds the request, behind `self`."""
    returns = inspect.signature(method).return_annotation
    its = inspect.signature(build)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    functools.update_wrapper(method, build)
    signature = its.replace(parameters=[this, *its.parameters.values()], return_annotation=returns)
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


@functools.cache
def _takes_tenant(build: Callable[..., Any]) -> bool:
    return "tenant" in inspect.signature(build).parameters


def with_tenant(tenant: str | None, build: Callable[..., Any], kwargs: Any) -> Any:
    """With the client's own tenant, where the request has a word for it and the caller did not say it."""
    return {"tenant": tenant, **kwargs} if tenant is not None and _takes_tenant(build) else kwargs
