"""What the client is made of, without a server."""

import inspect
import subprocess
import sys
import typing
from typing import Any

import pytest

from engram_sglang.client import AsyncClient, Client, EngramError, ProtocolError, Snapshot, Status, TreeNode, Worker
from engram_sglang.client import call, http1, snapshots
from engram_sglang.client.address import Address
from engram_sglang.client.sse import SseEvent, SseParser


def public(kind: type) -> dict[str, Any]:
    return {name: it for name, it in vars(kind).items() if not name.startswith("_")}


def test_it_needs_only_the_standard_library() -> None:
    code = (
        "import sys, engram_sglang.client\n"
        "known = {'engram_sglang', '__main__', *sys.builtin_module_names, *sys.stdlib_module_names}\n"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - known))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import sys; before = set(sys.modules)\n" + code],
        capture_output=True, text=True, check=True,
    )
    assert run.stdout.strip() == "[]"


def test_both_clients_have_the_same_methods() -> None:
    ours, theirs = public(Client), public(AsyncClient)
    assert list(ours) == list(theirs)
    for name in ours:
        both = inspect.signature(ours[name]), inspect.signature(theirs[name])
        assert list(both[0].parameters.values()) == list(both[1].parameters.values()), name
        assert ours[name].__name__ == name and ours[name].__doc__ == theirs[name].__doc__ != None, name  # noqa: E711
    assert inspect.signature(Client.__init__) == inspect.signature(AsyncClient.__init__)
    assert inspect.iscoroutinefunction(AsyncClient.save) and not inspect.iscoroutinefunction(Client.save)


@pytest.mark.parametrize(
    ("text", "host", "port", "path"),
    [
        ("http://127.0.0.1:7070", "127.0.0.1", 7070, None),
        ("http://localhost/", "localhost", 80, None),
        ("http://[::1]:7070", "::1", 7070, None),
        ("unix:/run/engram/rest.sock", "", 0, "/run/engram/rest.sock"),
        ("unix:///run/engram/rest.sock", "", 0, "/run/engram/rest.sock"),
    ],
)
def test_an_address_is_one_of_tcp_or_a_path(text: str, host: str, port: int, path: str | None) -> None:
    found = Address.parse(text)
    assert (found.host, found.port, found.path) == (host, port, path)


@pytest.mark.parametrize(
    "text", ["", "localhost:7070", "https://localhost", "http://", "http://a:b", "http://a:70000", "http://u:p@a",
             "http://a/path", "http://a?b", "unix:relative", "unix:", "unix:/a\0b", "http://ä"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Client(text)


def test_what_a_client_is_told_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"token": "a\r\nX: y"}, {"token": "ä"}, {"timeout": 0}, {"generate_timeout": -1}, {"max_answer": 0}):
        with pytest.raises(ValueError) as error:
            Client(**wrong)  # type: ignore[arg-type]
        assert str(wrong.get("token", "no token")) not in str(error.value)
    monkeypatch.setenv("ENGRAM_URL", "unix:/x")
    monkeypatch.setenv("ENGRAM_TOKEN", "hidden")
    settings = Client()._settings
    assert (settings.address.path, settings.token) == ("/x", "hidden") and "hidden" not in repr(settings)


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at:at + size] for at in range(0, len(data), size)]


EVENTS = (
    b"\xef\xbb\xbf:\n\n"
    b"id: 1\nevent: saved\ndata: {\"a\":\ndata: 1}\n\n"
    b"data:x\r\n\r\n"
    b"data: \xc3\xbc\rid\r\r"
    b"event: nothing\n\n"
    b"unknown: y\ndata\n\n"
    b"id: a\0b\ndata: z\n\n"
    b"data: unfinished\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_however_they_are_cut(size: int) -> None:
    parser = SseParser(1000)
    found = [event for piece in in_pieces(EVENTS, size) for event in parser.feed(piece)]
    assert found == [
        SseEvent("saved", '{"a":\n1}', "1"), SseEvent("message", "x", None), SseEvent("message", "ü", ""),
        SseEvent("message", "", None), SseEvent("message", "z", None),
    ]


def test_an_event_is_bounded_however_many_lines_it_has() -> None:
    for endless in (b"data: x\n", b"x", b": comment\n"):
        parser = SseParser(1000)
        with pytest.raises(ProtocolError):
            for _ in range(2000):
                parser.feed(endless)
    with pytest.raises(ProtocolError):
        SseParser(1000).feed(b"data: \xff\n\n")


def headers(*lines: bytes) -> http1.Headers:
    return http1.head(b"HTTP/1.1 200 OK\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n")[1]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_body_is_found_however_it_is_cut(size: int) -> None:
    chunks = b"5;x=y\r\nhello\r\n00b\r\n, world! :)\r\n0\r\nTrailer: x\r\n\r\n"
    for line, data in ((b"Transfer-Encoding: Chunked", chunks), (b"Content-Length: 16", b"hello, world! :)")):
        body = http1.Body(200, headers(line))
        assert b"".join(body.feed(piece) for piece in in_pieces(data, size)) == b"hello, world! :)"
        assert body.over and body.clean
        body = http1.Body(200, headers(line))
        body.feed(data[:-1])
        with pytest.raises(ConnectionError):
            body.ended()
        body = http1.Body(200, headers(line))
        body.feed(data + b"HTTP/1.1 200 OK")
        assert body.over and not body.clean
    endless = http1.Body(200, headers())
    assert endless.feed(b"abc") == b"abc" and not endless.over
    endless.ended()
    assert endless.over and not endless.clean


def test_a_record_is_what_it_says() -> None:
    node = {"conversation_id": "c", "turns": [{"turn_number": 1, "forks": [{"conversation_id": "d", "new": 1}]}]}
    fork = TreeNode.read(node).turns[0].forks[0]
    assert fork.conversation_id == "d" and fork.extra == {"new": 1}
    assert Snapshot.read({"snapshot_id": "s", "timestamp": 5, "tier": "ram"}).timestamp == 5.0
    assert hash(Snapshot.read({"snapshot_id": "s", "x": []})) and Status.read({"version": "1", "extra": 3}).extra
    worker = Worker.read({"session": "s", "versions": {"a": "1"}, "load": {"hooks": {"tick": {"calls": 2}}}})
    assert worker.load is not None and worker.load.hooks["tick"].calls == 2
    for wrong in (None, [], {}, {"snapshot_id": None}, {"snapshot_id": 5}, {"snapshot_id": "s", "boundary": True},
                  {"snapshot_id": "s", "boundary": 1.5}, {"snapshot_id": "s", "fill_ids": [1, "2"]},
                  {"snapshot_id": "s", "fill_ids": {}}, {"snapshot_id": "s", "tier": None}):
        with pytest.raises(ProtocolError, match="Snapshot"):
            Snapshot.read(wrong)
    with pytest.raises(AttributeError):
        fork.conversation_id = "e"  # type: ignore[misc]


def test_names_are_parts_of_a_path_and_nothing_more() -> None:
    target = snapshots.snapshot("a/../b?c#d %ü").request.target
    assert target == "/v1/snapshots/a%2F..%2Fb%3Fc%23d%20%25%C3%BC"
    assert call.target("/x", a="b c&d", n=3, t=True, none=None) == "/x?a=b%20c%26d&n=3&t=true"
    for bad in (lambda: snapshots.snapshot(""), lambda: call.dump({"x": float("nan")})):
        with pytest.raises(ValueError):
            bad()


def test_every_error_is_one_of_the_client() -> None:
    from engram_sglang.client import errors

    for kind in typing.cast("list[type]", [*errors._TYPES.values(), *errors._STATUSES.values()]):
        assert issubclass(kind, EngramError)
        assert kind.__name__ in sys.modules["engram_sglang.client"].__all__
