"""Objects of an answer as frozen dataclasses.

A field that is not known here is kept in `extra`; one that is missing and has a default gets that. So
a newer daemon does not break an older client. A known field of another type does: it would surprise
later, and elsewhere.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import ProtocolError

R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True)
class Record:
    """An object of an answer."""

    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields that this version does not know."""

    @classmethod
    def read(cls: type[R], value: object, where: str = "") -> R:
        """Raises ProtocolError when it is no such object."""
        where = where or cls.__name__
        if not isinstance(value, dict):
            raise ProtocolError(f"{where} is no object", type="protocol")
        known, taken = _shape(cls), dict[str, Any]()
        for name, (kind, needed) in known.items():
            if name in value:
                taken[name] = _read(kind, value[name], f"{where}.{name}")
            elif needed:
                raise ProtocolError(f"{where}.{name} is missing", type="protocol")
        return cls(**taken, extra={name: it for name, it in value.items() if name not in known})


_shapes: dict[type[Record], dict[str, tuple[Any, bool]]] = {}


def _shape(cls: type[Record]) -> dict[str, tuple[Any, bool]]:
    """Name -> type, and whether it must be there; looked up once for each class."""
    if cls not in _shapes:
        _shapes[cls] = _look_up(cls)
    return _shapes[cls]


def _look_up(cls: type[Record]) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return {
        it.name: (hints[it.name], it.default is missing and it.default_factory is missing)
        for it in dataclasses.fields(cls)
        if it.name != "extra"
    }


def _read(kind: Any, value: object, where: str) -> Any:
    if kind is Any:
        return value
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (it for it in inner if it is not type(None))
        return _read(kind, value, where)
    if origin is tuple and isinstance(value, list):
        if inner[0] is int:
            # Token ids come by the hundred thousand.
            if all(type(it) is int for it in value):
                return tuple(value)
        else:
            return tuple(_read(inner[0], it, f"{where}[{at}]") for at, it in enumerate(value))
    elif origin is collections.abc.Mapping and isinstance(value, dict):
        return {name: _read(inner[1], it, f"{where}.{name}") for name, it in value.items()}
    elif isinstance(kind, type) and issubclass(kind, Record):
        return kind.read(value, where)
    elif kind is float and type(value) in (int, float):
        return float(typing.cast(float, value))
    elif type(value) is kind:
        return value
    raise ProtocolError(f"{where} is not what it should be", type="protocol")
