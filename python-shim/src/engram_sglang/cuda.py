"""The staging ring in a GPU's memory, and copies between it and the pools or its window, on an NVIDIA GPU.

The ring is an allocation of its own, made with the driver: its IPC handle shows the daemon the ring and
nothing else. Taking memory, exporting it and the self-test happen on the link thread, on a stream of the
ring's own, and never in the way of what SGLang captures or computes.

In mode engine the window's memory is registered with the driver by the link thread too, in small steps: each keeps
other calls of the driver waiting for some milliseconds.

Copies from and to the pools run on a side stream. A copy waits for all that SGLang queued so far, by events on the device; with
`before_next` SGLang's streams wait for the copy likewise, and so they do for what was queued of a copy that
raised. Copies between ring and window have a stream for each direction, which waits for nothing but the gather before a
copy out. The scheduler thread waits for nothing: it asks whether events are over.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import _channel_layout as layout
from .carrier import Carrier
from .copier import Event
from .handshake import self_test_pattern
from .ring import NoRing, RingSpace, Window

_GRAIN = 2 << 20
_NON_BLOCKING = 1
_RELAXED = 2
_UUID_BYTES = 16
_HANDLE_BYTES = 64
_LAST_COPIES_S = 10.0
_OUT_OF_MEMORY = 2
_EVENTS = 256
# Bytes of a window that are registered at once.
_STEP = 32 << 20
_PORTABLE = 1


class CudaFailed(Exception):
    """The driver said no."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class Driver:
    """libcuda, as far as it is needed, in the primary context of one GPU: that of torch."""

    def __init__(self, ordinal: int) -> None:
        """Raises OSError without a driver, CudaFailed if it says no."""
        self._lib = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        self._context = ctypes.c_void_p()
        # Held for as long as the process lives: torch never gives it back either.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise CudaFailed(f"{name}: {(text.value or b'?').decode()} ({code})", code)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The context is this thread's, and what another thread captures into a graph is not disturbed."""
        mode = ctypes.c_int(_RELAXED)
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def uuid(self) -> bytes:
        """Which GPU, for every process the same."""
        out = (ctypes.c_ubyte * _UUID_BYTES)()
        name = "cuDeviceGetUuid_v2" if hasattr(self._lib, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self._call(name, out, self._device)
        return bytes(out)

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> tuple[bytes, int]:
        """The IPC handle of the allocation, and where in it `address` is."""
        handle, start, size = _Handle(), ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address))
        return bytes(handle.reserved), address - start.value

    def register(self, address: int, size: int) -> None:
        """Memory of this process from and to which the GPU may copy by itself."""
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), _PORTABLE)

    def unregister(self, address: int) -> None:
        """The start of what was registered at once."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def end_stream(self, stream: ctypes.c_void_p) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def copy_out(self, host: int, address: int, size: int, stream: ctypes.c_void_p) -> None:
        """From the GPU to registered memory, and waits for it."""
        to, size_ = ctypes.c_void_p(host), ctypes.c_size_t(size)
        self._call("cuMemcpyDtoHAsync_v2", to, ctypes.c_uint64(address), size_, stream)
        self._call("cuStreamSynchronize", stream)

    def copy_in(self, address: int, host: int, size: int, stream: ctypes.c_void_p) -> None:
        """The other way round."""
        source, size_ = ctypes.c_void_p(host), ctypes.c_size_t(size)
        self._call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), source, size_, stream)
        self._call("cuStreamSynchronize", stream)

    def write(self, address: int, data: bytes, stream: ctypes.c_void_p) -> None:
        """Copies `data` to the GPU, and waits for it."""
        self._call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)), stream)
        self._call("cuStreamSynchronize", stream)

    def read(self, address: int, size: int, stream: ctypes.c_void_p) -> bytes:
        """Copies from the GPU, and waits for it."""
        out = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoHAsync_v2", out, ctypes.c_uint64(address), ctypes.c_size_t(size), stream)
        self._call("cuStreamSynchronize", stream)
        return out.raw


class _Lane:
    """A stream whose copies tell their end by events that are recorded in turn: who waits for a copy longer than for all
    of these hears of it later, and never too early. The driver makes an event when it is first recorded."""

    def __init__(self, torch: Any, device: Any, events: int) -> None:
        self.stream = torch.cuda.Stream(device=device)
        made = [torch.cuda.Event() for _ in range(events)]
        for event in made:
            event.record(self.stream)
        self._events = itertools.cycle(made)

    def next(self) -> Any:
        return next(self._events)


class _Memory:
    """An allocation, as torch takes it. The ring frees it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3
        }


class CudaRing:
    """A ring in the memory of a GPU, for pools that are there. Made and closed by the link thread."""

    device_kind = 2  # DEVICE_KIND_CUDA
    fd: int | None = None
    outlives_peer = False
    no_ipc: str | None = None
    """Why other processes cannot open it, if so."""

    def __init__(self, size: int, device: Any, idle: Callable[[], bool] = lambda: True) -> None:
        """`idle`: whether all copies that were queued up to its first call are over. Raises NoRing or CudaFailed."""
        import torch

        self.size = -(-size // _GRAIN) * _GRAIN
        self._idle = idle
        self._lock = threading.Lock()
        self._driver = Driver(device.index)
        # What was taken is given back if the rest fails: a full GPU is tried again and again.
        with self._driver.entered(), contextlib.ExitStack() as undo:
            self._address = self._take(self.size)
            undo.callback(self._driver.free, self._address)
            self._stream = self._driver.stream()
            undo.callback(self._driver.end_stream, self._stream)
            try:
                self.ipc_handle, self.ipc_offset = self._driver.export(self._address)
            except CudaFailed as error:
                # As in some containers. There is another way.
                self.ipc_handle, self.ipc_offset, self.no_ipc = b"", 0, str(error)
            self.device_uuid = self._driver.uuid()
            self.bytes: Any = torch.as_tensor(_Memory(self._address, self.size), device=device)
            undo.pop_all()
        self.space = RingSpace(self.size)
        self._window: Window | None = None
        self._registered: list[int] = []

    def _take(self, size: int) -> int:
        try:
            return self._driver.allocate(size)
        except CudaFailed as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            raise NoRing(
                f"the GPU has no {size >> 20} MiB left for the staging ring, which is memory beside SGLang's own: "
                f"lower --mem-fraction-static or ENGRAM_RING_BYTES"
            ) from None

    def prepare_self_test(self) -> None:
        """Leaves the pattern that the daemon answers."""
        with self._driver.entered():
            self._driver.write(self._address, self_test_pattern(), self._stream)

    def check_self_test(self) -> bool:
        """Whether the daemon answered with the complement; clears it."""
        with self._driver.entered():
            found = self._driver.read(self._address, layout.HANDSHAKE_SELF_TEST_BYTES, self._stream)
            self._driver.write(self._address, bytes(len(found)), self._stream)
        return found == bytes(b ^ 0xFF for b in self_test_pattern())

    def carry(self, window: Window) -> Carrier:
        """Mode engine: the daemon reaches `window`, which is this ring's from now on. Takes its memory, and proves that the
        GPU copies from and to it. Raises OSError or NoRing."""
        self._window = window
        start = window.bytes.data_ptr()
        carried = False
        try:
            for offset, size in window.take(_STEP):
                with self._driver.entered():
                    self._driver.register(start + offset, size)
                self._registered.append(start + offset)
            self._prove(start)
            carried = True
        except CudaFailed as error:
            raise NoRing(
                f"mode engine needs {window.size >> 20} MiB of host memory that the GPU may copy from and to, and the "
                f"driver gives none ({error}): raise the limit of locked memory (ulimit -l), lower ENGRAM_RING_BYTES, or "
                f"let the daemon use mode ipc"
            ) from None
        finally:
            if not carried:
                with self._driver.entered():
                    self._unregister()
                self._window = None
        return Carrier(self.bytes, window.bytes, _STEP)

    def _unregister(self) -> None:
        while self._registered:
            with contextlib.suppress(CudaFailed):
                self._driver.unregister(self._registered.pop())

    def _prove(self, window: int) -> None:
        """A pattern goes from the ring to the window, and its complement back."""
        assert self._window is not None, "it is carried"
        size = layout.HANDSHAKE_SELF_TEST_BYTES
        self.prepare_self_test()
        with self._driver.entered():
            self._driver.copy_out(window, self._address, size, self._stream)
        out = self._window.turn_self_test()
        with self._driver.entered():
            self._driver.copy_in(self._address, window, size, self._stream)
        if not (out and self.check_self_test()):
            raise CudaFailed("other bytes came than were sent")

    def close(self) -> None:
        """Frees the memory once no copy uses it. May be called again."""
        with self._lock:
            address, self._address = self._address, 0
        if not address:
            return
        end = time.monotonic() + _LAST_COPIES_S
        with self._driver.entered():
            while not self._idle() and time.monotonic() < end:
                time.sleep(0.001)
            self._driver.end_stream(self._stream)
            # The driver lets what still runs end first.
            self._driver.free(address)
            self._unregister()
        if self._window is not None:
            self._window.close()


class _Event:
    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())


class CudaCopier:
    """Copies on a side stream, in order with SGLang's own."""

    def __init__(self, device: Any, forward: Any = None) -> None:
        """`forward`: the stream on which SGLang runs the model, if it has one of its own."""
        import torch

        self._torch, self.device, self._forward = torch, device, forward
        self._side = _Lane(torch, device, _EVENTS)
        self.side = self._side.stream
        self._lanes = [_Lane(torch, device, _EVENTS), _Lane(torch, device, _EVENTS)]
        """Out and in."""
        # Recorded anew each time: who waits for an event waits for what it was recorded behind by then.
        self._before = [torch.cuda.Event(), torch.cuda.Event()]

    def submit(self, copy: Callable[[], None], *, before_next: bool) -> Event:
        cuda = self._torch.cuda
        current, forward, side = cuda.current_stream(self.device), self._forward, self.side
        streams = [current] if forward is None or forward == current else [current, forward]
        for stream, before in zip(streams, self._before):
            before.record(stream)
            side.wait_event(before)
        event, whole = self._side.next(), False
        # What the context manager does, without looking up again what is known.
        cuda.set_stream(side)
        try:
            copy()
            whole = True
        finally:
            cuda.set_stream(current)
            event.record(side)
            # A copy that raised halfway may still write to what its owner now gives back.
            if before_next or not whole:
                for stream in streams:
                    stream.wait_event(event)
        return _Event(event)

    def carry(self, copy: Callable[[], None], after: Event | None, *, inward: bool) -> Event:
        cuda, lane = self._torch.cuda, self._lanes[inward]
        if isinstance(after, _Event):
            lane.stream.wait_event(after.event)
        current, event = cuda.current_stream(self.device), lane.next()
        cuda.set_stream(lane.stream)
        try:
            copy()
        finally:
            cuda.set_stream(current)
            event.record(lane.stream)
        return _Event(event)

    def fence(self) -> Callable[[], bool]:
        """Tells whether all that was submitted up to its first call is over. For any thread."""
        made: list[Any] = []

        def over() -> bool:
            if not made:
                for lane in (self._side, *self._lanes):
                    event = self._torch.cuda.Event()
                    event.record(lane.stream)
                    made.append(event)
            return all(event.query() for event in made)

        return over
