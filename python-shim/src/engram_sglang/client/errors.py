"""What can go wrong, by type.

The daemon names each of its errors (`code` of a problem, `error.type`); most names are classes here. A name that this
version does not know is an error of the class that its status has, so that a newer daemon's errors
are still caught by what catches the older ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class EngramError(Exception):
    """Every error of this client is one."""

    def __init__(
        self, message: str, *, status: int | None = None, type: str = "error", retryable: bool = False,
        request_id: str | None = None, retry_after: float | None = None, details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        """Of the answer; None where there is none."""
        self.type = type
        """In one word."""
        self.retryable = retryable
        """The same request may succeed later."""
        self.request_id = request_id
        """Of the request, as it stands in the daemon's log."""
        self.retry_after = retry_after
        """Seconds after which another try is worth it, if the daemon says so."""
        self.details: Mapping[str, Any] = details or {}
        """What else the error has, such as `need_bytes`."""

    def __str__(self) -> str:
        status = "" if self.status is None else f", status {self.status}"
        return f"{self.message} ({self.type}{status})"


class InvalidRequest(EngramError):
    """The request is malformed, or asks for what there is no room for."""


class Unauthorized(EngramError):
    """The token is missing or wrong, or the daemon does not serve this host name."""


class NotFound(EngramError):
    """There is no such conversation, turn, branch or snapshot."""


class Conflict(EngramError):
    """What there is does not allow it."""


class NoState(Conflict):
    """The conversation is known, and no state of it was kept."""


class TokensUnknown(Conflict):
    """The turn is known, and not what was said in it."""


class AlreadyExists(Conflict):
    """There is one of that name."""


class Mismatch(Conflict):
    """The snapshot is of another model, shape or namespace."""


class Changed(Conflict):
    """It is not, or not any more, as the request saw it."""


class TooLarge(EngramError):
    """The request is larger than the daemon takes."""


class NoSpace(EngramError):
    """No room in a tier."""


class QuotaExceeded(NoSpace):
    """The namespace holds its quota: see `used_bytes`, `quota_bytes` and `need_bytes` in `details`."""


class Unavailable(EngramError):
    """The daemon cannot do it now."""


class Busy(Unavailable):
    """Too much at a time."""


class NoAnswerInTime(Unavailable):
    """The daemon took too long; what was asked for may still be done."""


class UpstreamError(EngramError):
    """The inference server failed, cannot be reached, or took too long."""


class NotImplementedByDaemon(EngramError):
    """The daemon cannot do this, or was not configured for it."""


class InternalError(EngramError):
    """A fault of the daemon, or stored bytes that are missing or damaged."""


class Unreachable(EngramError):
    """No daemon answers, or the connection broke."""


class TimedOut(EngramError):
    """No answer within this client's own time; what was asked for may still be done."""


class ProtocolError(EngramError):
    """What answers is no daemon, or one whose answer this client does not understand."""


_TYPES: dict[str, type[EngramError]] = {
    "invalid_request": InvalidRequest,
    "unsupported": InvalidRequest,
    "tokenization_error": InvalidRequest,
    "unsupported_media_type": InvalidRequest,
    "method_not_allowed": InvalidRequest,
    "unauthorized": Unauthorized,
    "host_not_allowed": Unauthorized,
    "not_found": NotFound,
    "no_state": NoState,
    "tokens_unknown": TokensUnknown,
    "already_exists": AlreadyExists,
    "mismatch": Mismatch,
    "conflict": Conflict,
    "precondition_failed": Changed,
    "too_large": TooLarge,
    "no_space": NoSpace,
    "quota_exceeded": QuotaExceeded,
    "busy": Busy,
    "unavailable": Unavailable,
    "timeout": NoAnswerInTime,
    "request_timeout": NoAnswerInTime,
    "bad_upstream": UpstreamError,
    "upstream_unavailable": UpstreamError,
    "upstream_timeout": UpstreamError,
    "not_implemented": NotImplementedByDaemon,
    "internal": InternalError,
    "data": InternalError,
}

_STATUSES: dict[int, type[EngramError]] = {
    400: InvalidRequest, 401: Unauthorized, 403: Unauthorized, 404: NotFound, 405: InvalidRequest,
    408: NoAnswerInTime, 409: Conflict, 412: Changed, 413: TooLarge, 415: InvalidRequest, 422: InvalidRequest, 429: Busy,
    500: InternalError, 501: NotImplementedByDaemon, 502: UpstreamError, 503: Unavailable, 504: UpstreamError,
    507: NoSpace,
}

_RETRYABLE = frozenset({408, 429, 502, 503, 504, 507})

_TEXT_MAX = 500
"""Characters of an answer that is no JSON, in an error's message."""


def error_of(status: int, body: bytes, *, request_id: str | None, retry_after: str | None = None) -> EngramError:
    """The error that an answer is, whoever wrote it: the daemon, or the inference server behind it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        text = body[:_TEXT_MAX].decode(errors="replace").strip()
        value = {"message": text or f"status {status}"}
    return error_in(value, status=status, request_id=request_id, retry_after=_seconds(retry_after))


def error_in(
    value: Mapping[str, Any], *, status: int | None, request_id: str | None, retry_after: float | None = None,
) -> EngramError:
    """The error in an object: `{"error": {"type", "message"}}`, problem details, or the server's own."""
    inner = value.get("error")
    detail: Mapping[str, Any] = inner if isinstance(inner, dict) else value
    if isinstance(inner, str):
        detail = {**value, "message": inner}
    # Problem details name their type by a URI that ends in it.
    kind = _first(detail, value, "type").rstrip("/").rpartition("/")[2].rpartition(":")[2]
    message = _first(detail, value, "message", "detail", "title") or f"status {status}"
    if status is None:
        code = detail.get("code", detail.get("status"))
        status = code if isinstance(code, int) and not isinstance(code, bool) else None
    by_status = _STATUSES.get(status or 0, InternalError if (status or 0) >= 500 else EngramError)
    retryable = detail.get("retryable", value.get("retryable"))
    if not isinstance(retryable, bool):
        retryable = status in _RETRYABLE
    known = {"type", "message", "retryable", "success", "error", "code", "param", "title", "status", "detail"}
    return _TYPES.get(kind, by_status)(
        message, status=status, type=kind or "error", retryable=retryable, request_id=request_id,
        retry_after=retry_after, details={name: it for name, it in detail.items() if name not in known},
    )


def _first(detail: Mapping[str, Any], value: Mapping[str, Any], *names: str) -> str:
    for where in (detail, value):
        for name in names:
            text = where.get(name)
            if isinstance(text, str) and text:
                return text
    return ""


def _seconds(text: str | None) -> float | None:
    # Also allowed is a date, which the daemon never sends.
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else None
