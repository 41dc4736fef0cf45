"""Copies and rings on a GPU, with a recording stand-in for the driver and for torch: what happens when they say no."""

import contextlib
import ctypes
import importlib
import sys
import types

import pytest


class Stream:
    """A queue that only notes what comes into it."""

    cuda_stream = 7

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_event(self, event):
        self.log.append((self.name, "waits", event.recorded))


class Event:
    """Knows what it was recorded behind."""

    def __init__(self, log=None):
        self.recorded, self.log = None, log

    def record(self, stream):
        self.recorded = (stream.name, sum(1 for entry in stream.log if entry[0] == stream.name and entry[1] == "runs"))

    def query(self):
        return False


@pytest.fixture
def gpu(monkeypatch):
    """A fake torch, and what its streams were given."""
    log = []
    current = Stream(log, "current")
    cuda = types.SimpleNamespace(
        Event=lambda: Event(log),
        Stream=lambda device=None: Stream(log, "side"),
        current_stream=lambda device=None: cuda.now,
        now=current,
    )
    cuda.set_stream = lambda stream: setattr(cuda, "now", stream)
    torch = types.ModuleType("torch")
    torch.cuda, torch.log = cuda, log
    torch.as_tensor = lambda memory, device=None: memory
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def copier(torch):
    from engram_sglang.cuda import CudaCopier

    return CudaCopier("gpu", Stream(torch.log, "forward"))


@pytest.mark.parametrize("before_next", [False, True])
def test_what_is_queued_before_a_copy_raises_comes_before_what_follows(gpu, before_next):
    def copy():
        gpu.log.append((gpu.cuda.now.name, "runs", None))
        raise RuntimeError("CUDA out of memory")

    one = copier(gpu)
    with pytest.raises(RuntimeError, match="out of memory"):
        one.submit(copy, before_next=before_next)
    waits = [entry for entry in gpu.log if entry[0] in ("current", "forward")]
    assert waits == [("current", "waits", ("side", 1)), ("forward", "waits", ("side", 1))]
    assert gpu.cuda.now.name == "current"


@pytest.mark.parametrize("before_next", [False, True])
def test_who_waits_for_a_copy(gpu, before_next):
    one = copier(gpu)
    event = one.submit(lambda: gpu.log.append(("side", "runs", None)), before_next=before_next)
    assert not event.done()
    waits = [entry for entry in gpu.log if entry[0] in ("current", "forward")]
    expected = [(name, "waits", ("side", 1)) for name in ("current", "forward")] if before_next else []
    assert waits == expected


def test_an_event_that_is_recorded_again_is_over_with_its_last_copy(gpu):
    one = copier(gpu)
    first = one.submit(lambda: None, before_next=False)
    for _ in range(255):
        one.submit(lambda: gpu.log.append(("side", "runs", None)), before_next=False)
    assert first.event.recorded == ("side", 0)
    last = one.submit(lambda: None, before_next=False)
    assert first.event is last.event and last.event.recorded == ("side", 255)


class Launches:
    """A kernel that notes its launches, and what was compiled for them."""

    def __init__(self):
        self.made, self.compiled = [], []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.made.append((grid, arguments[10]))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return launch


class Compiled:
    """It notes its launches, too."""

    def __init__(self):
        self.made = []

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.made.append((grid, arguments[10], stream))


@pytest.fixture
def fused(gpu, monkeypatch):
    """The module of the kernels, without a compiler, and how many tables it made."""
    language = types.SimpleNamespace(int64=0, int32=0, int16=0, int8=0, constexpr=None)
    triton = types.ModuleType("triton")
    triton.jit = lambda **how: lambda function: function
    triton.language = language
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    gpu.int64 = "int64"
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "engram_sglang.fused", raising=False)
    module = importlib.import_module("engram_sglang.fused")
    monkeypatch.setattr(module, "_move", Launches())
    yield module
    sys.modules.pop("engram_sglang.fused", None)


def test_pieces_go_one_by_one_where_no_table_is_free(fused, monkeypatch):
    import numpy

    class Table:
        def __init__(self):
            self.numbers = numpy.zeros((512, 5), dtype=numpy.int64)
            self.host = self.device = Part()
            self.event = Event()

    class Part:
        def __getitem__(self, where):
            return self

        def copy_(self, other, non_blocking):
            pass

    monkeypatch.setattr(fused, "_Table", lambda device: pytest.fail("memory is taken in the middle of a copy"))
    mover = fused.Mover.__new__(fused.Mover)
    mover._device = types.SimpleNamespace(type="cuda")
    mover._tables, mover._compiled = fused.deque([Table()]), {}
    sides = fused.Sides.__new__(fused.Sides)
    vars(sides).update(table=1, rows=16, columns=32, grid_columns=1, count=2, page=0, word=8)
    rows = types.SimpleNamespace(dtype="int64", is_contiguous=lambda: True, record_stream=lambda stream: None)
    pieces = numpy.array([[0, 4, 0, 0, 4], [4096, 4, 0, 4, 4], [8192, 3, 0, 8, 3]])
    mover._launch(sides, 1, rows, pieces, False)
    # What was compiled for the first is launched as it is.
    single = ((1, 2, 1), True)
    assert fused._move.made == [single] and fused._move.compiled[0].made == [(*single, 7)] * 2
    mover._tables[0].event.query = lambda: True
    mover._launch(sides, 1, rows, pieces, False)
    mover._launch(sides, 1, rows, pieces, False)
    whole = ((1, 2, 3), False)
    assert fused._move.made == [single, whole] and fused._move.compiled[1].made == [(*whole, 7)]
    mover._launch(sides, 1, rows, pieces, True)
    assert fused._move.made == [single, whole, whole], "the other way is another kernel"


class Driver:
    """A driver that counts what it gave, and refuses one call."""

    refuses, code = "", 2
    memory, streams = 0, 0
    registered: list = []
    ring = b""

    def __init__(self, ordinal):
        pass

    def _may(self, call):
        from engram_sglang.cuda import CudaFailed

        if Driver.refuses == call:
            raise CudaFailed(f"{call}: no", Driver.code)

    def entered(self):
        return contextlib.nullcontext()

    def stream(self):
        self._may("stream")
        Driver.streams += 1
        return "stream"

    def end_stream(self, stream):
        Driver.streams -= 1

    def allocate(self, size):
        self._may("allocate")
        Driver.memory += 1
        return 1 << 32

    def free(self, address):
        Driver.memory -= 1

    def register(self, address, size):
        self._may("register" if not Driver.registered else "register again")
        Driver.registered.append((address, size))

    def unregister(self, address):
        Driver.registered.remove(next(one for one in Driver.registered if one[0] == address))

    def write(self, address, data, stream):
        Driver.ring = data

    def read(self, address, size, stream):
        return Driver.ring[:size]

    def copy_out(self, host, address, size, stream):
        assert any(start <= host and host + size <= start + length for start, length in Driver.registered)
        ctypes.memmove(host, Driver.ring, size)

    def copy_in(self, address, host, size, stream):
        assert any(start <= host and host + size <= start + length for start, length in Driver.registered)
        Driver.ring = ctypes.string_at(host, size) if Driver.refuses != "copy back" else Driver.ring

    def export(self, address):
        self._may("export")
        return bytes(64), 0

    def uuid(self):
        self._may("uuid")
        return bytes(16)


@pytest.fixture
def driver(gpu, monkeypatch):
    from engram_sglang import cuda

    monkeypatch.setattr(cuda, "Driver", Driver)
    for name, value in {"refuses": "", "code": 2, "memory": 0, "streams": 0, "registered": [], "ring": b""}.items():
        monkeypatch.setattr(Driver, name, value)
    return Driver


@pytest.mark.parametrize("call", ["stream", "allocate", "uuid"])
def test_a_ring_that_cannot_be_made_leaves_nothing(driver, call):
    from engram_sglang.cuda import CudaFailed, CudaRing
    from engram_sglang.ring import NoRing

    driver.refuses = call
    for _ in range(3):
        with pytest.raises((CudaFailed, NoRing)):
            CudaRing(1, types.SimpleNamespace(index=0))
    assert (driver.memory, driver.streams) == (0, 0)
    driver.refuses = ""
    ring = CudaRing(1, types.SimpleNamespace(index=0))
    assert (driver.memory, driver.streams) == (1, 1)
    ring.close()
    ring.close()
    assert (driver.memory, driver.streams) == (0, 0)


def test_a_full_gpu_says_what_is_missing(driver):
    from engram_sglang.cuda import CudaRing
    from engram_sglang.ring import NoRing

    driver.refuses = "allocate"
    with pytest.raises(NoRing, match=r"no 512 MiB left .* --mem-fraction-static"):
        CudaRing(512 << 20, types.SimpleNamespace(index=0))


class Tensor:
    """Of a memfd's memory, as far as its address matters."""

    def __init__(self, memory):
        self._bytes = (ctypes.c_ubyte * len(memory)).from_buffer(memory)

    def data_ptr(self):
        return ctypes.addressof(self._bytes)


@pytest.fixture
def window(gpu, monkeypatch):
    """One of three steps, as large as the rings here."""
    from engram_sglang import cuda
    from engram_sglang.ring import Window

    gpu.uint8 = "uint8"
    gpu.frombuffer = lambda memory, dtype: Tensor(memory)
    monkeypatch.setattr(cuda, "_STEP", 768 << 10)
    return Window(2 << 20)


def test_a_window_is_registered_in_steps_proven_and_given_back(driver, window):
    from engram_sglang.cuda import CudaRing

    ring = CudaRing(2 << 20, types.SimpleNamespace(index=0))
    ring.carry(window)
    start = window.bytes.data_ptr()
    sizes = [(start, 768 << 10), (start + (768 << 10), 768 << 10), (start + (1536 << 10), 512 << 10)]
    assert driver.registered == sizes
    assert driver.ring == bytes(65536), "the proof is cleared"
    ring.close()
    assert driver.registered == [] and window.fd is None
    ring.close()


@pytest.mark.parametrize("call", ["register", "register again", "copy back"])
def test_a_window_that_the_gpu_does_not_reach_says_why_and_leaves_nothing(driver, window, call):
    from engram_sglang.cuda import CudaRing
    from engram_sglang.ring import NoRing

    ring = CudaRing(2 << 20, types.SimpleNamespace(index=0))
    driver.refuses = call
    with pytest.raises(NoRing, match=r"2 MiB of host memory .*ulimit -l"):
        ring.carry(window)
    assert driver.registered == []
    driver.refuses = ""
    ring.carry(window)
    ring.close()
    assert (driver.memory, driver.streams, driver.registered) == (0, 0, [])


def test_a_ring_that_cannot_be_exported_says_so_and_is_there(driver):
    from engram_sglang.cuda import CudaRing

    driver.refuses = "export"
    ring = CudaRing(1, types.SimpleNamespace(index=0))
    assert ring.no_ipc == "export: no" and ring.ipc_handle == b""
    ring.close()
    assert (driver.memory, driver.streams) == (0, 0)


def test_copies_to_the_window_wait_for_the_gather_alone_and_nothing_for_them(gpu):
    one = copier(gpu)
    gathered = one.submit(lambda: gpu.log.append(("side", "runs", None)), before_next=True)
    del gpu.log[:]
    streams = []
    out = one.carry(lambda: streams.append(gpu.cuda.now), gathered, inward=False)
    into = one.carry(lambda: streams.append(gpu.cuda.now), None, inward=True)
    assert streams == [one._lanes[0].stream, one._lanes[1].stream] and gpu.cuda.now.name == "current"
    assert gpu.log == [("side", "waits", ("side", 1))], "the lane waits for the gather; the forward waits for nothing"
    assert not out.done() and not into.done()
    with pytest.raises(RuntimeError):
        one.carry(lambda: (_ for _ in ()).throw(RuntimeError("no")), None, inward=True)
    assert gpu.cuda.now.name == "current"


def test_a_carrier_copies_the_places_it_is_told_and_never_across_a_step():
    from engram_sglang.carrier import Carrier

    class Bytes:
        def __init__(self, name, log):
            self.name, self.log = name, log

        def __getitem__(self, where):
            return Bytes((self.name, where.start, where.stop), self.log)

        def copy_(self, other, non_blocking):
            assert non_blocking
            self.log.append((self.name, other.name))

    log = []
    carrier = Carrier(Bytes("ring", log), Bytes("window", log), 100)
    carrier.out([(10, 90), (150, 170)])
    places = [(10, 100), (150, 200), (200, 300), (300, 320)]
    assert log == [(("window", *place), ("ring", *place)) for place in places]
    del log[:]
    carrier.into([(99, 2), (200, 100)])
    places = [(99, 100), (100, 101), (200, 300)]
    assert log == [(("ring", *place), ("window", *place)) for place in places]
