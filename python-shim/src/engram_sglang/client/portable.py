"""A snapshot as a pair of files, `NAME.safetensors` and `NAME.json`, from a daemon and to one.

An export has no file under its names until all of it is there; the description comes last, so that a
pair that has one is whole. Neither way is more than a piece of it in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .call import Answer, Call, Request, Upload, dump, flat, target
from .errors import EngramError, ProtocolError
from .http1 import PIECE
from .snapshots import Snapshot, select

DESCRIPTION_MAX = 64 << 20
"""Bytes of the JSON file."""
IMPORT_PATIENCE_S = 660.0
"""The daemon waits ten minutes for its disk once all has come."""


@dataclass(frozen=True)
class Exported:
    """The pair that was written."""

    snapshot_id: str
    tensors: Path
    description: Path
    tensor_bytes: int
    boundary: int | None
    """Tokens that it holds."""


@dataclass(frozen=True, kw_only=True)
class ImportedSnapshot(Snapshot):
    """The snapshot that was taken in, under an id of this daemon's own."""

    exported_as: str = ""
    """Its id where it was exported."""
    already_here: bool = False
    """Nothing had to be written."""
    names_taken: tuple[str, ...] = ()
    """Names that it had and that others have here."""
    message: str = ""


def pair(name: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Tensors and description, of a name or of either file."""
    base = Path(name)
    if base.suffix in (".safetensors", ".json"):
        base = base.with_suffix("")
    return base.with_name(base.name + ".safetensors"), base.with_name(base.name + ".json")


class Export:
    """Writes a pair as it comes. A file that could not be finished is taken away by `close`."""

    def __init__(
        self, name: str | os.PathLike[str], conversation_id: str | None = None, *, rid: str | None = None,
        turn: int | None = None, branch: str | None = None, snapshot_id: str | None = None, overwrite: bool = False,
        tenant: str | None = None,
    ) -> None:
        """Raises FileExistsError."""
        self.tensors, self.description = pair(name)
        for there in (self.tensors, self.description):
            if not overwrite and os.path.lexists(there):
                raise FileExistsError(f"{there} is there")
        body = select(conversation_id, rid, turn, branch, snapshot_id, tenant)
        self.request = Request("POST", "/v1/export", dump(body), accept="application/octet-stream", repeatable=True,
                               long=True)
        self._part = self.tensors.with_name(f"{self.tensors.name}.{os.getpid()}.part")
        self._file: IO[bytes] | None = None
        self._left = self._size = 0
        self._rest = bytearray()
        self._answer: Answer | None = None

    def opened(self, answer: Answer) -> None:
        """Takes the head of a good answer."""
        size = answer.headers.get("x-engram-tensor-bytes", "")
        if not (size.isascii() and size.isdigit()) or len(size) > 18 or "x-engram-snapshot" not in answer.headers:
            raise answer.strange("it is no export")
        self._answer, self._left, self._size = answer, int(size), int(size)
        self._rest.clear()
        self._file = open(self._part, "xb")

    def feed(self, piece: bytes) -> None:
        """Takes bytes as they come."""
        assert self._file is not None and self._answer is not None
        tensors = piece[:self._left]
        self._file.write(tensors)
        self._left -= len(tensors)
        self._rest += piece[len(tensors):]
        if len(self._rest) > DESCRIPTION_MAX:
            raise self._answer.strange("its description never ends")

    def finish(self) -> Exported:
        """All has come: puts the files under their names. Raises ProtocolError where not all has come."""
        assert self._file is not None and self._answer is not None
        try:
            about = json.loads(self._rest) if self._left == 0 else None
        except (ValueError, RecursionError):
            about = None
        if not isinstance(about, dict) or about.get("file_bytes", self._size) != self._size:
            text = "the export broke off before it was whole"
            raise ProtocolError(text, type="protocol", retryable=True, request_id=self._answer.request_id)
        _sync(self._file)
        self._file = None
        # Of a pair that is written over, the old description must not stand beside the new tensors.
        self.description.unlink(missing_ok=True)
        os.replace(self._part, self.tensors)
        draft = self.description.with_name(f"{self.description.name}.{os.getpid()}.part")
        with open(draft, "wb") as file:
            file.write(self._rest)
            _sync(file)
        os.replace(draft, self.description)
        boundary = about.get("boundary")
        return Exported(
            self._answer.headers["x-engram-snapshot"], self.tensors, self.description, self._size,
            boundary if type(boundary) is int else None,
        )

    def close(self) -> None:
        """Whatever became of it: nothing unfinished is left."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._part.unlink(missing_ok=True)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def export_to(
    name: str | os.PathLike[str], conversation_id: str | None = None, *, rid: str | None = None,
    turn: int | None = None, branch: str | None = None, snapshot_id: str | None = None, overwrite: bool = False,
    tenant: str | None = None,
) -> Export:
    """Writes a snapshot, of the latest turn where none is named, as `NAME.safetensors` and `NAME.json`."""
    return Export(name, conversation_id, rid=rid, turn=turn, branch=branch, snapshot_id=snapshot_id,
                  overwrite=overwrite, tenant=tenant)


@dataclass(frozen=True)
class Import:
    """Two calls: whether a pair would be taken, and the pair."""

    check: Call[None]
    send: Call[ImportedSnapshot]


def import_from(
    name: str | os.PathLike[str], *, conversation_id: str | None = None, names: bool = True, new_model: bool = False,
    durable: bool = True,
) -> Import:
    """Takes in a pair, in another conversation if one is named, or with `names=False` in none. A model that the store
    does not hold is refused unless it holds none, or with `new_model`."""
    tensors, description = pair(name)
    with open(description, "rb") as file:
        about = file.read(DESCRIPTION_MAX + 1)
    if len(about) > DESCRIPTION_MAX:
        raise ValueError(f"{description} is no description of a snapshot: it is too large")
    size = os.stat(tensors).st_size
    query: dict[str, Any] = {
        "conversation_id": conversation_id, "names": names, "new_model": new_model, "durable": durable,
    }
    check = Request("POST", target("/v1/import/check", **query), about, repeatable=True)
    body = Upload(8 + len(about) + size, _pieces(about, tensors, size))
    # A second time it finds all of it here.
    send = Request("POST", target("/v1/import", **query), body, kind="application/octet-stream", repeatable=True,
                   long=True, patience=IMPORT_PATIENCE_S)
    return Import(Call(check, lambda _: None), Call(send, flat(ImportedSnapshot)))


def _pieces(about: bytes, tensors: Path, size: int) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield len(about).to_bytes(8, "little") + about
        left = size
        try:
            with open(tensors, "rb") as file:
                while left > 0:
                    piece = file.read(min(PIECE, left))
                    if not piece:
                        raise OSError("it became shorter while it was sent")
                    left -= len(piece)
                    yield piece
        except OSError as error:
            # Not to be taken for a failure of the connection.
            raise EngramError(f"{tensors} cannot be read: {error}", type="file") from error

    return pieces
