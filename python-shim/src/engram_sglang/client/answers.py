"""What is generated: a client names a conversation and sends only what is new.

Keyword arguments that are not named here go to the inference server as they are: sampling parameters,
stops, log probabilities, tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .call import EVENTS, Answer, Call, Request, check_stream, dump, flat, given, ids, in_stream, post
from .errors import EngramError, ProtocolError
from .records import Record
from .sse import SseParser

T = TypeVar("T")

CHUNK_MAX = 16 << 20
"""Bytes of one event of a streamed answer: the server's own surface repeats all of the text in each."""


@dataclass(frozen=True, kw_only=True)
class Usage(Record):
    """What an answer cost."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    total_tokens: int = 0
    cached_tokens: int | None = None
    """Of the prompt, that were there already."""
    prefilled_tokens: int | None = None
    """Of the prompt, that had to be computed."""
    wire_tokens: int | None = None
    """That this client sent."""
    boundary: int | None = None
    """Of the snapshot that it went on from."""


@dataclass(frozen=True, kw_only=True)
class Origin(Record):
    """What an answer went on from."""

    conversation_id: str = ""
    rid: str = ""
    """By which the turn can be saved."""
    request_id: str = ""
    from_turn: int = 0
    branched: bool = False
    """It parted from the conversation's latest turn."""
    known_tokens: int = 0
    compatibility_result: str = ""
    fallback_reason: str | None = None
    """Why the prompt is not what was said before, and more; None: it is."""


@dataclass(frozen=True, kw_only=True)
class Generated(Record):
    """An answer of the server's own surface; or, streamed, what there is of it so far."""

    text: str | None = None
    output_ids: tuple[int, ...] | None = None
    meta_info: Any = None
    id: str | None = None
    """The request's rid."""
    usage: Usage | None = None
    """Streamed: of the last event alone."""
    engram: Origin | None = None

    @property
    def finish_reason(self) -> Any:
        """Why it ended; None: it goes on."""
        return self.meta_info.get("finish_reason") if isinstance(self.meta_info, dict) else None


@dataclass(frozen=True, kw_only=True)
class Message(Record):
    """What was said; or, streamed, a piece of it."""

    role: str | None = None
    content: str | None = None
    tool_calls: Any = None
    reasoning_content: str | None = None


@dataclass(frozen=True, kw_only=True)
class Choice(Record):
    """One answer of a chat."""

    message: Message
    index: int = 0
    finish_reason: str | None = None
    logprobs: Any = None


@dataclass(frozen=True, kw_only=True)
class Chat(Record):
    """The answer of a chat."""

    choices: tuple[Choice, ...]
    id: str | None = None
    """The request's rid, in a conversation."""
    model: str | None = None
    created: int | None = None
    usage: Usage | None = None
    engram: Origin | None = None

    @property
    def content(self) -> str:
        """The text of the first answer."""
        return (self.choices[0].message.content or "") if self.choices else ""


@dataclass(frozen=True, kw_only=True)
class ChunkChoice(Record):
    """A piece of one answer of a chat."""

    delta: Message = Message()
    index: int = 0
    finish_reason: str | None = None
    logprobs: Any = None


@dataclass(frozen=True, kw_only=True)
class ChatChunk(Record):
    """A piece of a chat's answer."""

    choices: tuple[ChunkChoice, ...] = ()
    id: str | None = None
    model: str | None = None
    created: int | None = None
    usage: Usage | None = None
    """Of the last piece alone."""
    engram: Origin | None = None

    @property
    def content(self) -> str:
        """The text that it adds."""
        return (self.choices[0].delta.content or "") if self.choices else ""


@dataclass(frozen=True, kw_only=True)
class Tokenized(Record):
    """The tokens of messages."""

    token_ids: tuple[int, ...]
    token_count: int = 0
    chat_template_name: str | None = None


class Talk(Generic[T]):
    """Reads a streamed answer, which ends with `[DONE]`."""

    def __init__(self, where: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> None:
        self._request = Request("POST", where, dump({**body, "stream": True}), accept=EVENTS, long=True)
        self._read = read
        self._parser = SseParser(CHUNK_MAX)
        self._id: str | None = None
        self._error: EngramError | None = None
        self.over = False

    def request(self) -> Request:
        return self._request

    def opened(self, answer: Answer) -> None:
        check_stream(answer)
        self._id = answer.request_id

    def feed(self, piece: bytes) -> list[T]:
        if self._error is not None:
            raise self._error
        found: list[T] = []
        for event in self._parser.feed(piece):
            if event.data == "[DONE]":
                self.over = True
                break
            try:
                value = json.loads(event.data)
            except (ValueError, RecursionError):
                raise ProtocolError("an event is no JSON", type="protocol", request_id=self._id) from None
            if isinstance(value, dict) and value.get("error"):
                error = in_stream(value, self._id)
                if found:
                    # What came before it is the caller's; the error is found again at the next piece.
                    self._error = error
                    break
                raise error
            found.append(self._read(value))
        return found

    def ended(self) -> bool:
        if self._error is not None:
            raise self._error
        return self.over

    def lost(self, error: EngramError) -> float:
        # Asking again would say it twice.
        raise self._error or error


def _generate(
    conversation_id: str, input_ids: Iterable[int] | None, text: str | None, turn: int | None, branch: str | None,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    known = given(conversation_id=conversation_id, text=text, turn=turn, branch=branch)
    return {**fields, **known, **given(input_ids=None if input_ids is None else ids(input_ids))}


def generate(
    conversation_id: str, *, input_ids: Iterable[int] | None = None, text: str | None = None, turn: int | None = None,
    branch: str | None = None, **fields: Any,
) -> Call[Generated]:
    """Goes on with a conversation from new tokens or new text; from its latest turn where none is named."""
    body = _generate(conversation_id, input_ids, text, turn, branch, fields)
    return post("/v1/generate", body, Generated.read, long=True)


def generate_stream(
    conversation_id: str, *, input_ids: Iterable[int] | None = None, text: str | None = None, turn: int | None = None,
    branch: str | None = None, **fields: Any,
) -> Talk[Generated]:
    """The same, as it comes. Leaving `with` ends the request."""
    return Talk("/v1/generate", _generate(conversation_id, input_ids, text, turn, branch, fields), Generated.read)


def _chat(
    messages: Iterable[Mapping[str, Any]], conversation_id: str | None, turn: int | None, branch: str | None,
    model: str, fields: Mapping[str, Any],
) -> dict[str, Any]:
    known = given(conversation_id=conversation_id, turn=turn, branch=branch)
    return {**fields, "model": model, "messages": [dict(it) for it in messages], **known}


def chat(
    messages: Iterable[Mapping[str, Any]], *, conversation_id: str | None = None, turn: int | None = None,
    branch: str | None = None, model: str = "default", **fields: Any,
) -> Call[Chat]:
    """Goes on with a conversation from new messages; without a conversation these are all there are."""
    body = _chat(messages, conversation_id, turn, branch, model, fields)
    return post("/v1/chat/completions", body, Chat.read, long=True)


def chat_stream(
    messages: Iterable[Mapping[str, Any]], *, conversation_id: str | None = None, turn: int | None = None,
    branch: str | None = None, model: str = "default", **fields: Any,
) -> Talk[ChatChunk]:
    """The same, as it comes. Leaving `with` ends the request."""
    body = _chat(messages, conversation_id, turn, branch, model, fields)
    return Talk("/v1/chat/completions", body, ChatChunk.read)


def tokenize_chat(
    messages: Iterable[Mapping[str, Any]], *, add_generation_prompt: bool = False, **fields: Any,
) -> Call[Tokenized]:
    """The tokens that the chat template makes of messages."""
    body = {**fields, "messages": [dict(it) for it in messages], "add_generation_prompt": add_generation_prompt}

    return post("/tokenize_chat", body, flat(Tokenized), repeatable=True, long=True)
