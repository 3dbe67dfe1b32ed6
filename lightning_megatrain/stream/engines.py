"""Engines: how bytes reach the device and come back. They differ in primitives only; whoever orders copies doesn't know which one runs.

`DirectEngine`: the device is the CPU and units are used in place. `EmulatedEngine`: streams are threads, device memory is separate CPU memory,
copies take as long as a bus would, freed memory is poisoned. `CudaEngine`: torch's own streams and events, on CUDA and ROCm.

A stream runs its work in the order in which it was given. An event marks a point of a stream: another stream waits for it in its own order,
the host waits by `Event.wait`.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatrain.stream.record import Mark, Now


class Event(Protocol):
    """A point of a stream."""

    def wait(self) -> None:
        """Block the calling thread until the point is reached."""


class Stream(Protocol):
    """An ordered queue of copies."""

    def wait(self, event: Event) -> None:
        """What is given to this stream from now on starts after `event`."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` to `target`: two contiguous uint8 tensors of one size."""

    def poison(self, memory: Tensor) -> None:
        """Make freed memory unusable where the engine checks for that."""

    def record(self) -> Event:
        """The point after all work given so far."""

    def mark(self) -> Mark:
        """The same point, to be asked for its time."""


class Engine(Protocol):
    """Primitives of one device."""

    name: str
    device: torch.device
    in_place: bool  # the device reads host memory itself: nothing is copied
    compute: Stream
    to_device: Stream
    to_host: Stream

    def allocate(self, nbytes: int) -> Tensor:
        """Device memory of `nbytes`, uint8."""

    def spare_bytes(self, allocated: int) -> int:
        """Device memory that nobody asked for in the passes so far. `allocated`: bytes of slots and slabs."""

    def transient_bytes(self, allocated: int) -> int:
        """The most that a pass took beside them, as far as the engine can tell."""

    def check(self) -> None:
        """Raise what went wrong in one of the engine's threads."""

    def close(self) -> None:
        """End all threads. Idempotent."""


class _Reached:
    """An event of a stream that does its work at once."""

    def wait(self) -> None:
        return


class ImmediateStream:
    """Work is done when it is given: the compute stream of a CPU."""

    def wait(self, event: Event) -> None:
        event.wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def poison(self, memory: Tensor) -> None:
        return

    def record(self) -> Event:
        return _Reached()

    def mark(self) -> Mark:
        return Now()


class DirectEngine:
    """The device is the CPU: units are used where they are.

    Args:
        spare_bytes: tells how much memory activations may take.
    """

    name = "direct"
    in_place = True

    def __init__(self, spare_bytes: Callable[[], int] = lambda: 0) -> None:
        self._spare_bytes = spare_bytes
        self.device = torch.device("cpu")
        self.compute: Stream = ImmediateStream()
        self.to_device: Stream = self.compute
        self.to_host: Stream = self.compute

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def spare_bytes(self, allocated: int) -> int:
        return self._spare_bytes()

    def transient_bytes(self, allocated: int) -> int:
        return 0  # what a pass takes lies in host memory, of which only half is asked for

    def check(self) -> None:
        return

    def close(self) -> None:
        return


class _ThreadEvent:
    """Set by a thread; waiting for it raises what that thread died of."""

    def __init__(self, stream: ThreadStream) -> None:
        self._stream = stream
        self._reached = False
        self._gate = threading.Lock()  # held until the point is reached; several are made a unit, and a threading.Event costs ten times as much
        self._gate.acquire()

    def reach(self) -> None:
        self._reached = True
        self._gate.release()

    def wait(self) -> None:
        if not self._reached:
            with self._gate:
                pass
        if threading.current_thread() is not self._stream.thread:
            self._stream.check()


class _ThreadMark(_ThreadEvent):
    """An event that notes its time."""

    _at = 0.0

    def reach(self) -> None:
        self._at = time.perf_counter()
        super().reach()

    def seconds(self) -> float:
        self.wait()
        return self._at


class ThreadStream:
    """A stream that is a thread. After an error its work is skipped, its events are still reached, and whoever waits for one gets the error.

    Args:
        name: of the thread.
        gbps: copies take at least their bytes over this, in GB/s.
        jitter_seconds: largest random delay before a copy.
    """

    def __init__(self, name: str, gbps: float, jitter_seconds: float) -> None:
        self._bytes_per_second = gbps * 1e9
        self._jitter_seconds = jitter_seconds
        self._random = random.Random(name)
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self.busy_seconds = 0.0
        self.copied_bytes = 0
        self.thread = threading.Thread(target=self._run, name=f"megatrain-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if self._error is None or isinstance(getattr(work, "__self__", None), _ThreadEvent):
                    work()
            except BaseException as error:
                self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"a copy failed in {self.thread.name}: {self._error}") from self._error

    def wait(self, event: Event) -> None:
        self._work.put(event.wait)

    def copy(self, target: Tensor, source: Tensor) -> None:
        if target.numel() != source.numel() or target.dtype != torch.uint8 or source.dtype != torch.uint8:
            raise ValueError(
                f"found a copy of {source.numel()} elements of {source.dtype} to {target.numel()} of {target.dtype}, expected equal numbers of bytes"
            )
        self._work.put(partial(self._copy, target, source))

    def _copy(self, target: Tensor, source: Tensor) -> None:
        start = time.perf_counter()
        if self._jitter_seconds:
            time.sleep(self._random.uniform(0, self._jitter_seconds))
        # one thread and no lock of the interpreter, like a copy engine: torch's copy_ would start a team of threads in each stream
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
        rest = source.numel() / self._bytes_per_second - (time.perf_counter() - start)
        if rest > 0:
            time.sleep(rest)
        self.busy_seconds += time.perf_counter() - start
        self.copied_bytes += source.numel()

    def poison(self, memory: Tensor) -> None:
        # all ones: NaN as fp32 and as bf16
        self._work.put(partial(ctypes.memset, memory.data_ptr(), 0xFF, memory.numel()))

    def record(self) -> Event:
        event = _ThreadEvent(self)
        self._work.put(event.reach)
        return event

    def mark(self) -> _ThreadMark:
        event = _ThreadMark(self)
        self._work.put(event.reach)
        return event

    def close(self) -> None:
        if self.thread.is_alive():
            self._work.put(None)
            self.thread.join()


class EmulatedEngine:
    """Copies in threads into separate CPU memory; freed slots are NaN. Every ordering fault of the pipeline shows up without a GPU.

    Args:
        h2d_gbps, d2h_gbps, jitter_seconds: the bus, see `ThreadStream`.
        memory_bytes: size of the device's memory. Of activations it knows nothing.
    """

    name = "emulated"
    in_place = False

    def __init__(self, h2d_gbps: float, d2h_gbps: float, jitter_seconds: float, memory_bytes: int = 0) -> None:
        self._memory_bytes = memory_bytes
        self.device = torch.device("cpu")
        self.compute: Stream = ImmediateStream()
        self._to_device = ThreadStream("h2d", h2d_gbps, jitter_seconds)
        self._to_host = ThreadStream("d2h", d2h_gbps, jitter_seconds)
        self.to_device: Stream = self._to_device
        self.to_host: Stream = self._to_host

    def allocate(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def spare_bytes(self, allocated: int) -> int:
        return max(0, self._memory_bytes - allocated)

    def transient_bytes(self, allocated: int) -> int:
        return 0

    def check(self) -> None:
        self._to_device.check()
        self._to_host.check()

    def close(self) -> None:
        self._to_device.close()
        self._to_host.close()


class CudaStream:
    """One of torch's streams; None for whichever is current (compute)."""

    def __init__(self, stream: torch.Stream | None, device: torch.device, start: tuple[torch.Event, float]) -> None:
        self._stream = stream
        self._device = device
        self._start = start

    def _get(self) -> torch.Stream:
        return self._stream if self._stream is not None else torch.accelerator.current_stream(self._device)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _DeviceEvent)
        self._get().wait_event(event.event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        stream = self._get()
        with stream:
            target.copy_(source, non_blocking=True)
        # memory of torch's allocator must not be given to somebody else before the copy is over
        for tensor in (target, source):
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)

    def poison(self, memory: Tensor) -> None:
        return

    def record(self) -> Event:
        return _DeviceEvent(self._get().record_event())

    def mark(self) -> Mark:
        event = torch.Event(self._device, enable_timing=True)
        self._get().record_event(event)
        return _DeviceMark(event, self._start)


class _DeviceEvent:
    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class _DeviceMark:
    """Times of a device are differences: they are counted from an event whose time on the host's clock is known."""

    def __init__(self, event: torch.Event, start: tuple[torch.Event, float]) -> None:
        self._event, self._start = event, start

    def seconds(self) -> float:
        self._event.synchronize()
        event, at = self._start
        return at + event.elapsed_time(self._event) / 1000


class CudaEngine:
    """torch's streams on a GPU: compute on the current one, copies on one each way.

    Args:
        device: the GPU.
        memory_bytes: device memory that the run may use; None: what it has.
    """

    name = "cuda"
    in_place = False

    def __init__(self, device: torch.device, memory_bytes: int | None = None) -> None:
        self.device = device
        self._memory_bytes = memory_bytes
        torch.cuda.reset_peak_memory_stats(device)
        first = torch.Event(device, enable_timing=True)
        torch.accelerator.current_stream(device).record_event(first)
        first.synchronize()
        start = (first, time.perf_counter())
        self.compute: Stream = CudaStream(None, device, start)
        self.to_device: Stream = CudaStream(torch.Stream(device), device, start)
        self.to_host: Stream = CudaStream(torch.Stream(device), device, start)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def spare_bytes(self, allocated: int) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        have = free + torch.cuda.memory_reserved(self.device)
        if self._memory_bytes is not None:
            have = min(have, self._memory_bytes)
        return max(0, have - torch.cuda.max_memory_allocated(self.device))

    def transient_bytes(self, allocated: int) -> int:
        return max(0, torch.cuda.max_memory_allocated(self.device) - allocated)

    def check(self) -> None:
        return

    def close(self) -> None:
        torch.accelerator.synchronize(self.device)
