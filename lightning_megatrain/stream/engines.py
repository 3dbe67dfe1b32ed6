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


class DirectEngine:
    """The device is the CPU: units are used where they are."""

    name = "direct"
    in_place = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.compute: Stream = ImmediateStream()
        self.to_device: Stream = self.compute
        self.to_host: Stream = self.compute

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def check(self) -> None:
        return

    def close(self) -> None:
        return


class _ThreadEvent:
    """Set by a thread; waiting for it raises what that thread died of."""

    def __init__(self, stream: ThreadStream) -> None:
        self._stream = stream
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def wait(self) -> None:
        self._reached.wait()
        if threading.current_thread() is not self._stream.thread:
            self._stream.check()


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

    def close(self) -> None:
        if self.thread.is_alive():
            self._work.put(None)
            self.thread.join()


class EmulatedEngine:
    """Copies in threads into separate CPU memory; freed slots are NaN. Every ordering fault of the pipeline shows up without a GPU."""

    name = "emulated"
    in_place = False

    def __init__(self, h2d_gbps: float, d2h_gbps: float, jitter_seconds: float) -> None:
        self.device = torch.device("cpu")
        self.compute: Stream = ImmediateStream()
        self._to_device = ThreadStream("h2d", h2d_gbps, jitter_seconds)
        self._to_host = ThreadStream("d2h", d2h_gbps, jitter_seconds)
        self.to_device: Stream = self._to_device
        self.to_host: Stream = self._to_host

    def allocate(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def check(self) -> None:
        self._to_device.check()
        self._to_host.check()

    def close(self) -> None:
        self._to_device.close()
        self._to_host.close()


class CudaStream:
    """One of torch's streams; None for whichever is current (compute)."""

    def __init__(self, stream: torch.Stream | None, device: torch.device) -> None:
        self._stream = stream
        self._device = device

    def _get(self) -> torch.Stream:
        return self._stream if self._stream is not None else torch.accelerator.current_stream(self._device)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _DeviceEvent)
        self._get().wait_event(event.event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self._get():
            target.copy_(source, non_blocking=True)

    def poison(self, memory: Tensor) -> None:
        return

    def record(self) -> Event:
        return _DeviceEvent(self._get().record_event())


class _DeviceEvent:
    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class CudaEngine:
    """torch's streams on a GPU: compute on the current one, copies on one each way."""

    name = "cuda"
    in_place = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute: Stream = CudaStream(None, device)
        self.to_device: Stream = CudaStream(torch.Stream(device), device)
        self.to_host: Stream = CudaStream(torch.Stream(device), device)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def check(self) -> None:
        return

    def close(self) -> None:
        torch.accelerator.synchronize(self.device)
