"""How single fields of a channel message are written and read.

Which fields follow each other is generated, see `_channel_layout`.
"""

from __future__ import annotations

import enum
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

if sys.byteorder != "little" or array("I").itemsize != 4 or array("Q").itemsize != 8:
    raise ImportError("the channel's words are little endian, with ints of 4 and long longs of 8 bytes")

_COUNT = struct.Struct("<I")
_NONE: dict[int, Any] = {}
_T = TypeVar("_T", bound=enum.IntEnum)


class DecodeError(ValueError):
    """Bytes are not a message."""


def bool_(value: int) -> bool:
    """A bool is 0 or 1."""
    if value > 1:
        raise ValueError
    return value == 1


def raw(value: bytes, size: int) -> bytes:
    """`value`, which must have `size` bytes: struct would cut it, or fill it up."""
    if len(value) != size:
        raise ValueError(f"{len(value)} bytes instead of {size}")
    return value


def put_str(value: str) -> bytes:
    """A count of bytes and UTF-8. Raises ValueError for lone surrogates, which have none."""
    data = value.encode()
    return _COUNT.pack(len(data)) + data


def put_u32s(values: Sequence[int]) -> bytes:
    """A count and the numbers. Raises OverflowError if one does not fit."""
    return _COUNT.pack(len(values)) + array("I", values).tobytes()


def put_u64s(values: Sequence[int]) -> bytes:
    """A count and the numbers. Raises OverflowError if one does not fit."""
    return _COUNT.pack(len(values)) + array("Q", values).tobytes()


class Cursor:
    """A position in a body; every length is checked before anything is made of it."""

    __slots__ = ("_at", "_data", "_message")

    def __init__(self, message: str, data: bytes) -> None:
        self._message, self._data, self._at = message, data, 0

    def _take(self, field: str, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise DecodeError(f"{self._message}.{field}: the body ends before it does")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def fixed(self, field: str, form: struct.Struct) -> tuple[Any, ...]:
        """A run of fields of fixed size, of which `field` is the first."""
        return form.unpack(self._take(field, form.size))

    def str(self, field: str) -> str:
        """A count of bytes and UTF-8."""
        (count,) = self.fixed(field, _COUNT)
        try:
            return self._take(field, count).decode()
        except UnicodeDecodeError as error:
            raise DecodeError(f"{self._message}.{field}: {error}") from None

    def _list(self, field: str, code: str) -> list[int]:
        (count,) = self.fixed(field, _COUNT)
        words = array(code)
        words.frombytes(self._take(field, count * words.itemsize))
        return words.tolist()

    def u32s(self, field: str) -> list[int]:
        """A count and that many numbers."""
        return self._list(field, "I")

    def u64s(self, field: str) -> list[int]:
        """A count and that many numbers."""
        return self._list(field, "Q")

    def choice(self, field: str, kind: Any, value: int) -> Any:
        """`value` as `kind`: an enum, flags or a bool."""
        known = getattr(kind, "_value2member_map_", _NONE).get(value)
        if known is not None and not isinstance(known, enum.IntFlag):
            # Long before what follows would come to the same. Of flags, the class also keeps what has unknown bits.
            return known
        try:
            if isinstance(kind, type) and issubclass(kind, enum.IntFlag) and value & ~_all(kind):
                raise ValueError
            return kind(value)
        except ValueError:
            raise DecodeError(f"{self._message}.{field}: {value} is not a value of it") from None

    def optional(self, field: str, kind: type[_T], value: int) -> _T | None:
        """The same, where 0 stands for none."""
        return self.choice(field, kind, value) if value else None

    def end(self) -> None:
        """The body must be used up."""
        if self._at != len(self._data):
            left = len(self._data) - self._at
            raise DecodeError(f"{self._message}: {left} bytes follow the last field")


def _all(kind: type[enum.IntFlag]) -> int:
    return sum(kind.__members__.values())
