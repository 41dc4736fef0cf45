"""Both clients with a server that answers badly, late, or not at all."""

import asyncio
import concurrent.futures
import itertools
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from client_peer import STREAM, answer, chunk, peer

from engram_sglang import client as api

Make = Callable[..., Any]
STATUS = {"version": "9", "ready": True}
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_one_connection_serves_one_request_after_the_other(make: Make) -> None:
    def script(connection: socket.socket, at: int) -> bool:
        connection.sendall(answer({"version": str(at)}))
        return True

    with peer(script) as server:
        client = make(server.url, token="secret")
        assert [client.status().version for _ in range(5)] == ["0", "1", "2", "3", "4"]
        assert server.connections == 1
        head = server.requests[0].decode()
        assert head.startswith("GET /v1/status HTTP/1.1\r\n") and "Authorization: Bearer secret\r\n" in head
        ids = {line for request in server.requests for line in request.split(b"\r\n") if line[:12] == b"X-Request-Id"}
        assert len(ids) == 5


def test_a_connection_that_was_closed_meanwhile_is_not_used(make: Make) -> None:
    closed = threading.Event()

    def script(connection: socket.socket, at: int) -> bool:
        connection.sendall(answer(STATUS))
        if at == 0:
            connection.shutdown(socket.SHUT_RDWR)
            closed.set()
        return at > 0

    with peer(script) as server:
        client = make(server.url)
        client.status()
        assert closed.wait(30)
        # Also for what must not be sent twice.
        client.delete_turn("c", 1)
        client.generate("c", input_ids=[1])
        assert (len(server.requests), server.connections) == (3, 2)


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_connection_that_breaks_is_made_again_once_for_what_may_be_sent_twice(make: Make, repeatable: bool) -> None:
    def script(connection: socket.socket, at: int) -> bool:
        if at == 0:
            connection.sendall(answer(STATUS))
        return at == 0

    with peer(script) as server:
        client = make(server.url)
        client.status()
        with pytest.raises(api.Unreachable) as error:
            client.status() if repeatable else client.delete("s")
        assert error.value.retryable and error.value.status is None and error.value.request_id
        assert len(server.requests) == (3 if repeatable else 2)


@pytest.mark.parametrize(
    "bytes_",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"2\r\n{}oops\r\n0\r\n\r\n",
        CHUNKED + b"2\r\n{}\r\n",
        CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 1000,
        CHUNKED + b"f" * 100_000,
        CHUNKED + b"ffffffffffffff\r\n{}",
        answer(b"no json"),
        answer(b""),
        answer([1, 2]),
        answer({"version": 3}),
        answer({"ready": True}),
        answer({"version": "1", "workers": "many"}),
        answer(b"[" * 100_000),
        answer(b"9" * 100_000),
        answer(b'{"version": "\xff"}'),
    ],
)
def test_what_is_no_answer_is_an_error_of_its_own(make: Make, bytes_: bytes) -> None:
    with peer(bytes_) as server, pytest.raises((api.ProtocolError, api.Unreachable)) as error:
        make(server.url).status()
    assert error.value.request_id and len(str(error.value)) < 1000


def test_an_answer_is_no_larger_than_allowed(make: Make) -> None:
    def flood(connection: socket.socket, _: int) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)

    with peer(flood) as server, pytest.raises(api.ProtocolError, match="larger than 1000000 bytes"):
        make(server.url, max_answer=1_000_000).status()
    with peer(flood) as server, pytest.raises(api.ProtocolError):
        make(server.url, max_answer=1_000_000).export_to("/nowhere/x", "c")


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
def test_who_says_nothing_or_little_is_not_waited_for(make: Make, first: bytes) -> None:
    over = threading.Event()

    def drip(connection: socket.socket, _: int) -> None:
        connection.sendall(first)
        while not over.wait(0.05):
            # A header that goes on and on.
            connection.sendall(b"" if first else b"X")

    with peer(drip) as server:
        with pytest.raises(api.TimedOut) as error:
            make(server.url, timeout=0.3).status()
        assert error.value.retryable
        over.set()


def test_nobody_listens(make: Make, tmp_path: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        for url in (f"http://127.0.0.1:{taken.getsockname()[1]}", f"unix:{tmp_path}/none.sock"):
            with pytest.raises(api.Unreachable, match="No Engram daemon answers"):
                make(url).status()
            with pytest.raises(api.Unreachable), make(url).events():
                pass


def test_a_newer_daemon_does_not_break_it(make: Make) -> None:
    said = {"snapshot_id": "s", "boundary": 3, "success": True, "colour": "blue", "tier": "tape"}
    with peer(answer(said)) as server:
        saved = make(server.url).save("c")
    assert (saved.snapshot_id, saved.boundary, saved.tier, saved.extra) == ("s", 3, "tape", {"colour": "blue"})


@pytest.mark.parametrize(
    ("status", "said", "kind", "retryable"),
    [
        (409, {"success": False, "message": "m", "error": {"type": "no_state", "message": "m", "retryable": False}},
         api.NoState, False),
        (507, {"error": {"type": "quota_exceeded", "message": "m", "retryable": False, "need_bytes": 7}},
         api.QuotaExceeded, False),
        (503, {"error": {"type": "busy", "message": "m", "retryable": True}}, api.Busy, True),
        (503, {"error": {"type": "something_new", "message": "m", "retryable": True}}, api.Unavailable, True),
        (418, {"error": {"type": "something_new", "message": "m"}}, api.EngramError, False),
        (200, {"success": False, "message": "m"}, api.EngramError, False),
        (200, {"success": False, "message": "m", "error": {"type": "not_found", "message": "m"}}, api.NotFound, False),
        # Problem details, and the inference server's own.
        (409, {"type": "https://x/errors/no_state", "title": "t", "detail": "m", "status": 409}, api.NoState, False),
        (400, {"object": "error", "message": "m", "type": "BadRequestError", "code": 400}, api.InvalidRequest, False),
        (400, {"error": "m"}, api.InvalidRequest, False),
        (502, b"m", api.UpstreamError, True),
        (500, {"error": {"type": 5, "message": ["m"]}, "message": "m"}, api.InternalError, False),
    ],
)
def test_an_error_has_the_type_that_the_daemon_says(
    make: Make, status: int, said: Any, kind: type, retryable: bool
) -> None:
    with peer(answer(said, status, "X-Request-Id: theirs\r\nRetry-After: 7\r\n")) as server:
        for ask in (lambda: make(server.url).save("c"), lambda: next(make(server.url).generate_stream("c", text="x"))):
            with pytest.raises(api.EngramError) as error:
                ask()
            assert (type(error.value), error.value.message, error.value.status) == (kind, "m", status)
            assert (error.value.request_id, error.value.retry_after) == ("theirs", 7)
            assert error.value.retryable is retryable
            assert error.value.details.get("need_bytes") == (7 if kind is api.QuotaExceeded else None)


def test_not_ready_is_an_answer(make: Make) -> None:
    with peer(answer({"ready": False, "reasons": ["it starts"], "warnings": ["w"]}, 503)) as server:
        assert make(server.url).ready() == api.Readiness(ready=False, reasons=("it starts",), warnings=("w",))
    with peer(answer({"error": {"type": "busy", "message": "m"}}, 503)) as server, pytest.raises(api.Busy):
        make(server.url).ready()


def streamed(*data: str) -> bytes:
    return STREAM + b"".join(chunk(f"data: {it}\n\n".encode()) for it in data)


def test_a_streamed_answer_that_fails_says_why(make: Make) -> None:
    error = '{"error": {"type": "upstream_timeout", "message": "m"}}'
    with peer(streamed('{"text": "a"}', error, "[DONE]") + b"0\r\n\r\n") as server:
        pieces = make(server.url).generate_stream("c", text="x")
        assert next(pieces).text == "a"
        with pytest.raises(api.UpstreamError, match="upstream_timeout"):
            next(pieces)
        assert list(pieces) == []


@pytest.mark.parametrize("end", [b"", b"0\r\n\r\n"])
def test_a_streamed_answer_that_breaks_off_is_no_whole_one(make: Make, end: bytes) -> None:
    with peer(streamed('{"text": "a"}') + end) as server:
        pieces = make(server.url).generate_stream("c", text="x")
        assert next(pieces).text == "a"
        with pytest.raises(api.Unreachable, match="broke"):
            next(pieces)
        # It is not asked again: it would say it twice.
        assert len(server.requests) == 1


@pytest.mark.parametrize("bad", ["{", "[1]", '{"text": 5}', "x" * (17 << 20)])
def test_an_event_that_is_none_ends_the_stream(make: Make, bad: str) -> None:
    with peer(streamed(bad, "[DONE]") + b"0\r\n\r\n") as server, pytest.raises(api.ProtocolError):
        list(make(server.url).generate_stream("c", text="x"))


def test_a_line_that_never_ends_is_not_kept(make: Make) -> None:
    def flood(connection: socket.socket, _: int) -> None:
        connection.sendall(STREAM)
        while True:
            connection.sendall(chunk(b"x" * 65536))

    with peer(flood) as server, pytest.raises(api.ProtocolError, match="larger than"):
        next(make(server.url).events())


def test_an_answer_that_is_no_stream_is_refused(make: Make) -> None:
    with peer(answer({"text": "a"})) as server, pytest.raises(api.ProtocolError, match="no stream"):
        next(make(server.url).generate_stream("c", text="x"))


def test_events_come_back_where_they_were(make: Make) -> None:
    def script(connection: socket.socket, at: int) -> None:
        event = b"id: boot-%d\nevent: saved\ndata: {\"snapshot_id\": \"s%d\", \"name\": \"n\"}\n\n" % (at, at)
        if at == 1:
            connection.sendall(answer({"error": {"type": "busy", "message": "m", "retryable": True}}, 503))
        elif at < 4:
            connection.sendall(STREAM + chunk(b":\n\n" + event))
        else:
            connection.sendall(answer({"error": {"type": "unauthorized", "message": "m"}}, 401))

    with peer(script) as server:
        events = make(server.url).events(types=["saved"])
        found = list(itertools.islice(events, 3))
        assert [event.snapshot_id for event in found] == ["s0", "s2", "s3"]
        assert found[0].extra == {"name": "n"} and found[0].name == "saved"
        with pytest.raises(api.Unauthorized):
            next(events)
    last = [line for request in server.requests for line in request.split(b"\r\n") if line[:13] == b"Last-Event-ID"]
    assert last == [b"Last-Event-ID: boot-%d" % at for at in (0, 0, 2, 3)]


def test_an_export_that_breaks_off_leaves_no_file(make: Make, tmp_path: Any) -> None:
    head = "X-Engram-Tensor-Bytes: 4\r\nX-Engram-Snapshot: s\r\n"
    for body in (b"ab", b"abcd", b"abcd{", b"abcd[]", b'abcd{"file_bytes": 5}'):
        with peer(answer(body, more=head)) as server, pytest.raises(api.ProtocolError, match="broke off"):
            make(server.url).export_to(tmp_path / "x", "c")
    with peer(answer(b"abcd{}", more=head)[:-1]) as server, pytest.raises(api.Unreachable):
        make(server.url).export_to(tmp_path / "x", "c")
    assert list(tmp_path.iterdir()) == []
    with peer(answer(b"abcd{}", more=head)) as server:
        assert make(server.url).export_to(tmp_path / "x", "c").tensors.read_bytes() == b"abcd"


def test_an_import_that_is_refused_while_it_is_sent_says_why(make: Make, tmp_path: Any) -> None:
    (tmp_path / "x.json").write_text("{}")
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.truncate(64 << 20)
    refused = answer({"error": {"type": "no_space", "message": "m", "retryable": True}}, 507)
    heads: list[bytes] = []
    taken: list[int] = []

    def serve(listener: socket.socket) -> None:
        with listener:
            for at in range(2):
                connection, _ = listener.accept()
                with connection:
                    heads.append(connection.recv(1 << 20))
                    connection.sendall(answer({"success": True}, more="Connection: close\r\n") if at == 0 else refused)
                    # It listens a little, as the daemon does, so that its answer is not lost.
                    taken.append(len(heads[-1]))
                    while more := connection.recv(1 << 20):
                        taken[-1] += len(more)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, args=(listener,), daemon=True)
    thread.start()
    with pytest.raises(api.NoSpace):
        make(f"http://127.0.0.1:{listener.getsockname()[1]}").import_from(tmp_path / "x")
    thread.join(30)
    # The rest of it was not sent, and the connection not kept: the rest would be missing there.
    assert taken[1] < 64 << 20 and not thread.is_alive()
    assert heads[1].startswith(b"POST /v1/import?names=true&new_model=false&durable=true HTTP/1.1\r\n")


def test_nothing_is_asked_of_a_client_that_is_closed(make: Make) -> None:
    with peer(answer(STATUS)) as server:
        client = make(server.url)
        client.status()
        if isinstance(client, api.Client):
            client.close()
        else:
            client.run(client.client.close())
        with pytest.raises(ValueError):
            client.status()


def test_many_ask_at_once_and_each_gets_its_own(make: Make) -> None:
    def script(connection: socket.socket, _: int) -> bool:
        # Requests of several connections come between: this one's own is the last that it sent.
        connection.sendall(answer({"snapshot_id": last[connection].split(b"/")[3].split(b" ")[0].decode()}))
        return True

    last: dict[socket.socket, bytes] = {}
    with peer(script, seen=last) as server:
        client = make(server.url)
        names = [f"s{at}" for at in range(200)]
        if isinstance(client, api.Client):
            with concurrent.futures.ThreadPoolExecutor(16) as threads:
                found = list(threads.map(client.snapshot, names))
        else:
            async def all_of_them() -> list[api.Snapshot]:
                return await asyncio.gather(*map(client.client.snapshot, names))

            found = client.run(all_of_them())
        assert [it.snapshot_id for it in found] == names
