"""The way to the daemon: attaching, and the stream by which both sides know that the other lives.

What. One thread does all that may wait: gRPC, the socket for descriptors, taking memory for a ring, the
self-test. What comes out is a `Session`: a channel, a doorbell and a ring, handed to the scheduler
thread by one assignment. From then on the thread only beats. It never touches a pool, the tree, or a
channel that it handed over.

State. `Link.session` is made by the thread and taken by the scheduler (`take`). Either side ends it:
`Session.lost` is set by the thread, `Session.left` by the scheduler.

The mode. The worker says which transfer modes it can do, and the daemon which it is to be, twice: at Attach, and
after it tried to open the ring (proto/engram/v1/channel.toml, "Modes"). In mode engine the daemon reaches a window instead of
the ring; its memory is taken and registered here, before the scheduler hears of the session.

The ring. It is memory that SGLang might use, so it is taken only once a daemon answers, and kept over tries
that never showed it to one. When a session ends, a ring on a GPU is *parked*: freeing memory that another process
has open is undefined, and a daemon that was stopped may wake up and still write to it. It is freed when the
connection over which it was handed shows that the daemon hung up or died, and a moment after that, because the
connection's end and the ring's are not one step over there. As long as `_PARKED` rings are parked there is no new one.

Errors. Nothing here can fail the server. The daemon absent, refusing or dying means no session; the
thread tries again, ever more slowly, and says in the log what changed. A refusal that would not go away by
itself is asked again each half minute: people mend and replace daemons.
"""

from __future__ import annotations

import atexit
import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import _channel_layout as layout
from . import handshake
from .carrier import Carrier
from .channel import BadChannel, WorkerEnd, check_doorbell
from .handshake import MODE_ENGINE, MODE_IPC
from .ring import HostRing, NoRing, Window
from .settings import Settings

log = logging.getLogger(__name__)

PROTOCOL = 1001
_CALL_S = 10.0
_LAST_CALL_S = 3.0
LONGEST_RETRY_S = 30.0
# Rings of which it is not known that the daemon let go.
_PARKED = 2
_AFTER_HANGUP_S = 2.0

# Refusals that another try in a while may not meet again, whatever `retry_after_ms` says.
_TRANSIENT = frozenset({9, 10, 11, 13})  # UNAUTHENTICATED, NOT_READY, TOO_MANY_WORKERS, SELF_TEST


@dataclass
class Beat:
    """What the scheduler thread says of itself; replaced as a whole by each tick."""

    ticks: int = 0
    slots_free: int = 0
    slots_total: int = 0
    rows_free: int = 0
    rows_total: int = 0
    running: int = 0
    waiting: int = 0
    hooks: dict[str, dict[str, float]] = field(default_factory=dict)
    """How long each hook took, see `timing`."""


@dataclass
class Weights:
    """The weights as far as they are known; replaced as a whole by the scheduler thread."""

    epoch: int
    digest: bytes | None


class Session:
    """One attachment, as the scheduler thread uses it."""

    def __init__(
        self, end: WorkerEnd, doorbell: int, ring: Any, weights: Weights, passed: Any = None, carrier: Carrier | None = None
    ) -> None:
        self.end, self.doorbell, self.ring, self.weights = end, doorbell, ring, weights
        self.carrier = carrier
        """In mode engine: who copies between the ring and what the daemon reaches."""
        self.work: deque[Any] = deque()
        """Daemon-originated work, in order."""
        self.lost = False
        """Set by the thread: the daemon is gone."""
        self.left = threading.Event()
        """Set by the scheduler: it does not use the session any more."""
        self._passed = passed

    def close(self) -> None:
        """Unmaps the channel and ends the connection. By the thread, after `left`."""
        self.end.memory.close()
        if self._passed is not None:
            self._passed.close()

    def take_connection(self) -> socket.socket | None:
        """The connection whose end is the session's, to be looked after by the caller. Once."""
        return self._passed.take_connection() if self._passed is not None else None


class Parked:
    """A ring that a daemon may still have open, and the connection that says so."""

    def __init__(self, ring: Any, connection: socket.socket) -> None:
        self.ring, self._connection = ring, connection
        self._gone: float | None = None
        try:
            # The session is over: the daemon is to let go.
            connection.shutdown(socket.SHUT_WR)
            connection.setblocking(False)
        except OSError:
            pass  # it is gone already, and so says the first look

    def is_over(self) -> bool:
        """Whether the daemon hung up or died, some moments ago."""
        now = time.monotonic()
        if self._gone is None:
            try:
                # Nothing is ever said on it.
                if self._connection.recv(64):
                    return False
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                pass
            self._gone = now
        return now - self._gone >= _AFTER_HANGUP_S

    def free(self) -> None:
        """Nobody has it open any more."""
        self._connection.close()
        self.ring.close()


def dial(settings: Settings) -> Any:
    """A gRPC channel to the daemon, to be closed by who asked."""
    import grpc

    options = [("grpc.enable_http_proxy", 0), ("grpc.default_authority", "engram")]
    return grpc.insecure_channel(settings.daemon, options=options)


def token_of(settings: Settings) -> str:
    """What the daemon wants to see over TCP. Raises OSError."""
    if not settings.token_file:
        return ""
    with open(settings.token_file) as file:
        return file.read().strip()


class RefusedForGood(Exception):
    """The daemon will not have this worker, as both are now."""


class Link:
    """Keeps one session with the daemon, for as long as the process lives."""

    def __init__(
        self,
        settings: Settings,
        request: Callable[[Any], Any],
        ring_bytes: int,
        new_ring: Callable[[int], Any] = HostRing,
    ) -> None:
        """`request` fills what the pools are into an AttachRequest; `new_ring` makes a ring."""
        self._settings, self._request = settings, request
        self._ring_bytes, self._new_ring = ring_bytes, new_ring
        self.weights = Weights(1, None)
        self.beat = Beat()
        self.state = "absent"
        """For people: absent, attached, refused or closed."""
        self.reason = ""
        self.mode = ""
        """Of the last session: ipc or engine."""
        self._session: Session | None = None
        self._spare: Any = None
        self._parked: list[Parked] = []
        self._stop = threading.Event()
        self._begin = threading.Event()
        self._exits = threading.Event()
        self._thread: threading.Thread | None = None

    # --- By the scheduler thread ---

    def prepare(self) -> None:
        """Makes the thread, which may fail: it waits for `start`, or for `stop`."""
        thread = threading.Thread(target=self._run, name="engram-link", daemon=True)
        thread.start()
        self._thread = thread
        atexit.register(self._end)

    def start(self) -> None:
        """Starts trying."""
        if self._thread is None:
            self.prepare()
        self._begin.set()

    def take(self) -> Session | None:
        """A session that was not taken yet."""
        session, self._session = self._session, None
        return session

    def stop(self) -> None:
        """Ends it all; does not wait."""
        self._stop.set()
        self._begin.set()

    def _end(self) -> None:
        """The interpreter goes away: no thread may be inside gRPC then."""
        self.stop()
        self._exits.set()
        if self._thread is not None:
            self._thread.join(_LAST_CALL_S)

    # --- The thread ---

    def _run(self) -> None:
        try:
            self._begin.wait()
            self._try()
            spare, self._spare = self._spare, None
            if spare is not None:
                spare.close()
            while self._parked and not self._exits.wait(0.2):
                self._unpark()
        finally:
            atexit.unregister(self._end)

    def _try(self) -> None:
        """Attaches again and again."""
        pause = first = max(self._settings.retry_ms, 10) / 1000
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                after = self._attach_once()
                pause = first if time.monotonic() - began > 5 * first else min(2 * pause, LONGEST_RETRY_S)
                self._say("absent", after)
            except RefusedForGood as refused:
                self._say("refused", str(refused))
                pause = LONGEST_RETRY_S
            except handshake.Refused as refused:
                # Where the daemon cannot open the ring, the next try meets the same, as a rule.
                self._say("refused", f"the daemon cannot use the ring: {refused}")
                pause = min(2 * pause, LONGEST_RETRY_S)
            except NoRing as missing:
                self._say("refused", str(missing))
                pause = min(2 * pause, LONGEST_RETRY_S)
            except Exception as error:  # whatever gRPC, the system or a hostile peer comes up with
                self._say("absent", f"{type(error).__name__}: {error}")
                pause = min(2 * pause, LONGEST_RETRY_S)
            self._stop.wait(pause)
        self._say("closed", "")

    def _unpark(self) -> None:
        """Frees the rings that no daemon has open any more."""
        for parked in [parked for parked in self._parked if parked.is_over()]:
            self._parked.remove(parked)
            parked.free()

    def _park(self, ring: Any, connection: socket.socket | None, unseen: bool) -> None:
        """The session of this ring is over. `unseen`: the daemon never had a way to it."""
        if ring.outlives_peer or unseen or connection is None:
            if connection is not None:
                connection.close()
            ring.close()
        else:
            self._parked.append(Parked(ring, connection))

    def _say(self, state: str, reason: str) -> None:
        reason = reason[:500]
        if (state, reason) != (self.state, self.reason):
            level = logging.WARNING if state == "refused" else logging.INFO
            log.log(level, "engram: %s%s", state, f" ({reason})" if reason else "")
        self.state, self.reason = state, reason

    def _attach_once(self) -> str:
        """One session from its begin to its end. Answers why it ended."""
        from ._pb.engram.v1 import engram_pb2 as pb
        from ._pb.engram.v1 import engram_pb2_grpc as pb_grpc

        if self.weights.digest is None:
            return "the weights are being changed"
        self._unpark()
        if len(self._parked) >= _PARKED:
            raise NoRing(
                f"{len(self._parked)} daemons were left that still have a staging ring open; this server attaches again "
                f"when one of them ends or goes on"
            )
        with dial(self._settings) as channel:
            if not self._answers(pb, pb_grpc.AdminStub(channel)):
                return f"no daemon answers at {self._settings.daemon}"
            # One that no daemon ever opened may be used again; taking memory is not cheap everywhere.
            ring, self._spare = self._spare or self._new_ring(self._ring_bytes), None
            window: Window | None = None
            carrier: Carrier | None = None
            unseen = False
            # Where the daemon may have the ring open, what shows its end.
            shown: list[socket.socket | None] = []
            try:
                stub = pb_grpc.WorkerStub(channel)
                weights = self.weights
                if weights.digest is None:
                    return "the weights are being changed"
                modes = self._modes(ring)
                answer = stub.Attach(self._attach_request(pb, ring, weights, modes), timeout=_CALL_S)
                if answer.WhichOneof("result") != "attached":
                    return self._refused(answer.refusal)
                attached = answer.attached
                if attached.channel_version != layout.VERSION or attached.mode not in modes:
                    raise RefusedForGood("the daemon chose a channel or a mode that this worker does not have")
                unseen = attached.mode == MODE_ENGINE
                # A ring on a device may turn out to be out of the daemon's reach.
                if unseen or (MODE_ENGINE in modes and ring.fd is None):
                    window = Window(ring.size)
                    if unseen:
                        carrier = ring.carry(window)
                session = self._bind(attached, ring, (window, carrier), weights, shown.append)
                if session.carrier is None and window is not None:
                    # It was not needed, and none of its pages was.
                    window.close()
                    window = None
                try:
                    return self._keep(pb, stub, attached, session)
                finally:
                    session.lost = True
                    # The scheduler may be in the middle of using it.
                    if self._session is session:
                        self._session = None
                        session.left.set()
                    while not session.left.wait(0.2):
                        if self._stop.is_set():
                            break
                    shown.append(session.take_connection())
                    if session.left.is_set():
                        session.close()
            finally:
                if window is not None:
                    window.close()
                if shown:
                    self._park(ring, shown[0], unseen)
                elif carrier is None:
                    self._spare = ring
                else:
                    ring.close()

    def _answers(self, pb: Any, admin: Any) -> bool:
        """Whether a daemon is there; what it answers is all the same."""
        import grpc

        try:
            admin.Status(pb.StatusRequest(), timeout=_CALL_S)
        except grpc.RpcError as error:
            code = getattr(error, "code", lambda: None)()
            return code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return True

    def _modes(self, ring: Any) -> list[int]:
        """What this worker can do, best first."""
        wish = self._settings.mode
        if wish == "ipc" and ring.no_ipc is not None:
            raise NoRing(f"the staging ring cannot be shown to other processes ({ring.no_ipc}), and ENGRAM_MODE is ipc")
        if wish == "engine" or ring.no_ipc is not None:
            return [MODE_ENGINE]
        return [MODE_IPC] if wish == "ipc" else [MODE_IPC, MODE_ENGINE]

    def _attach_request(self, pb: Any, ring: Any, weights: Weights, modes: list[int]) -> Any:
        request = pb.AttachRequest(
            protocol=PROTOCOL, channel_version=layout.VERSION, epoch=weights.epoch, modes=modes
        )
        self._request(request)
        request.model.weights_digest = weights.digest
        request.ring.CopyFrom(
            pb.Ring(
                bytes=ring.size,
                device=ring.device_kind,
                device_uuid=ring.device_uuid,
                ipc_handle=ring.ipc_handle,
                ipc_offset=ring.ipc_offset,
            )
        )
        request.token = token_of(self._settings)
        return request

    def _refused(self, refusal: Any) -> str:
        text = f"refused: {refusal.message} ({refusal.reason})"
        if refusal.retry_after_ms == 0 and refusal.reason not in _TRANSIENT:
            raise RefusedForGood(text)
        self._stop.wait(min(refusal.retry_after_ms / 1000, LONGEST_RETRY_S))
        return text

    def _bind(
        self, attached: Any, ring: Any, window: tuple[Window | None, Carrier | None], weights: Weights,
        doubtful: Callable[[socket.socket], None],
    ) -> Session:
        """Hands the window over, or the ring. `window`: with its carrier if the mode is engine already. `doubtful`: see
        `handshake.connect`."""
        memory, carrier = window
        for tested in (ring if carrier is None else None, memory):
            if tested is not None:
                tested.prepare_self_test()
        shown = ring.fd if memory is None else memory.fd
        passed = handshake.connect(attached.fd_socket, attached.session, attached.secret, shown, _CALL_S, doubtful)
        try:
            if passed.mode == MODE_IPC and carrier is None:
                tested = ring
            elif passed.mode == MODE_ENGINE and memory is not None:
                tested = memory
            else:
                raise BadChannel("the daemon chose a mode that this worker does not have")
            if not tested.check_self_test():
                raise BadChannel("the daemon did not answer the self-test")
            if tested is memory and carrier is None:
                carrier = ring.carry(memory)
            self.mode = "ipc" if carrier is None else "engine"
            check_doorbell(passed.doorbell)
            end = WorkerEnd.open(passed.channel, passed.channel_bytes)
            # So that the scheduler thread meets no page of it for the first time.
            bytes(end.memory.u8[::4096])
        except BaseException:
            doubtful(passed.take_connection())
            passed.close()
            raise
        if end.session != attached.session or end.boot != attached.boot:
            doubtful(passed.take_connection())
            end.memory.close()
            passed.close()
            raise BadChannel("the channel belongs to another session")
        return Session(end, passed.doorbell, ring, weights, passed, carrier)

    def _keep(self, pb: Any, stub: Any, attached: Any, session: Session) -> str:
        """Beats until somebody ends the session."""
        beats: queue.SimpleQueue[Any] = queue.SimpleQueue()
        beats.put(pb.WorkerEvent(hello=pb.Hello(session=attached.session, secret=attached.secret)))
        stream = stub.Session(iter(beats.get, None))
        ended: list[str] = []
        over = threading.Event()

        def listen() -> None:
            try:
                for event in stream:
                    kind = event.WhichOneof("event")
                    if kind == "work":
                        session.work.append(event.work)
                    elif kind == "closing":
                        ended.append(f"the daemon closes: {event.closing.reason}")
                        break
                else:
                    ended.append("the daemon ended the stream")
            except Exception as error:  # grpc.RpcError, or a cancelled stream
                code = getattr(error, "code", lambda: error)()
                ended.append(f"the stream broke ({code})")
            over.set()

        listener = threading.Thread(target=listen, name="engram-listen", daemon=True)
        listener.start()
        self._say("attached", f"mode {self.mode}")
        self._session = session
        every = max(attached.heartbeat_ms, 100) / 1000 / 2
        try:
            while not over.wait(every):
                if self._stop.is_set():
                    return "this server shuts down"
                if session.left.is_set():
                    return "left by the scheduler"
                b = self.beat
                beats.put(
                    pb.WorkerEvent(
                        beat=pb.WorkerBeat(
                            ticks=b.ticks, slots_free=b.slots_free, slots_total=b.slots_total,
                            rows_free=b.rows_free, rows_total=b.rows_total, running=b.running, waiting=b.waiting,
                            hooks=[
                                pb.HookTime(
                                    name=name, calls=int(row["calls"]), mean_ns=int(row["mean_us"] * 1000),
                                    p99_ns=int(row["p99_us"] * 1000), max_ns=int(row["max_us"] * 1000),
                                )
                                for name, row in b.hooks.items()
                            ],
                        )
                    )
                )
            return ended[0] if ended else "the stream is over"
        finally:
            beats.put(None)
            stream.cancel()
            listener.join(_CALL_S)
