"""The staging ring in a GPU's memory, and copies between it and the pools, on an NVIDIA GPU.

The ring is an allocation of its own, made with the driver: its IPC handle shows the daemon the ring and
nothing else. Taking memory, exporting it and the self-test happen on the link thread, on a stream of the
ring's own, and never in the way of what SGLang captures or computes.

Copies run on a side stream. A copy waits for all that SGLang queued so far, by events on the device; with
`before_next` SGLang's streams wait for the copy likewise, and so they do for what was queued of a copy that
raised. The scheduler thread waits for nothing: it asks whether events are over.
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
from .copier import Event
from .handshake import self_test_pattern
from .ring import NoRing, RingSpace

_GRAIN = 2 << 20
_NON_BLOCKING = 1
_RELAXED = 2
_UUID_BYTES = 16
_HANDLE_BYTES = 64
_LAST_COPIES_S = 10.0
_OUT_OF_MEMORY = 2
_EVENTS = 256


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

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def end_stream(self, stream: ctypes.c_void_p) -> None:
        self._call("cuStreamDestroy_v2", stream)

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
            self.ipc_handle, self.ipc_offset = self._driver.export(self._address)
            self.device_uuid = self._driver.uuid()
            self.bytes: Any = torch.as_tensor(_Memory(self._address, self.size), device=device)
            undo.pop_all()
        self.space = RingSpace(self.size)

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


class _Event:
    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())


class CudaCopier:
    """Copies on a side stream, in order with SGLang's own."""

    def __init__(self, device: Any, forward: Any = None) -> None:
        """`forward`: the stream on which SGLang runs the model, if it has one of its own."""
        import torch

        self._torch, self.device, self._forward = torch, device, forward
        self.side = torch.cuda.Stream(device=device)
        # Recorded anew each time: who waits for an event waits for what it was recorded behind by then.
        self._before = [torch.cuda.Event(), torch.cuda.Event()]
        # These are recorded in turn, too: it is one stream, so that who waits for a copy longer than for all these hears
        # of it later, and never too early. The driver makes an event when it is first recorded.
        events = [torch.cuda.Event() for _ in range(_EVENTS)]
        for event in events:
            event.record(self.side)
        self._events = itertools.cycle(events)

    def submit(self, copy: Callable[[], None], *, before_next: bool) -> Event:
        cuda = self._torch.cuda
        current, forward, side = cuda.current_stream(self.device), self._forward, self.side
        streams = [current] if forward is None or forward == current else [current, forward]
        for stream, before in zip(streams, self._before):
            before.record(stream)
            side.wait_event(before)
        event, whole = next(self._events), False
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

    def fence(self) -> Callable[[], bool]:
        """Tells whether all that was submitted up to its first call is over. For any thread."""
        made: list[Any] = []

        def over() -> bool:
            if not made:
                event = self._torch.cuda.Event()
                event.record(self.side)
                made.append(event)
            return bool(made[0].query())

        return over
