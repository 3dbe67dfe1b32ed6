"""`Recorder`: when each stream did what, in the last steps. Two marks a copy, a call or an update; nothing is read before somebody asks."""

from __future__ import annotations

import enum
import time
from collections import deque
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol


class Mark(Protocol):
    """A point of a stream, with its time."""

    def seconds(self) -> float:
        """On the clock of `time.perf_counter`; waits until the point is reached."""


class Now:
    """A point of the calling thread."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds(self) -> float:
        return self._at


class Lane(enum.Enum):
    """Who works."""

    COMPUTE = "compute"
    TO_DEVICE = "in"
    TO_HOST = "out"
    UPDATE = "host step"


class Span(NamedTuple):
    """One piece of work.

    Attributes:
        lane: who did it.
        unit: index of the unit, or -1.
        backward: whether it belongs to the backward pass.
        begin, end: its marks.
        nbytes: what a copy moved, 0 for all else.
    """

    lane: Lane
    unit: int
    backward: bool
    begin: Mark
    end: Mark
    nbytes: int


class Recorder:
    """The spans of the last passes.

    Args:
        passes: how many are kept.
    """

    def __init__(self, passes: int = 4) -> None:
        self.passes: deque[tuple[Mark, list[Span]]] = deque(maxlen=passes)
        self._spans: list[Span] = []
        self.on = True

    def begin(self) -> None:
        """A training pass begins."""
        self._spans = []
        self.passes.append((Now(), self._spans))

    def add(self, lane: Lane, unit: int, begin: Mark, end: Mark, *, backward: bool = False, nbytes: int = 0) -> None:
        self._spans.append(Span(lane, unit, backward, begin, end, nbytes))

    def host(self, lane: Lane, unit: int) -> AbstractContextManager[None]:
        """Around work of the calling thread."""
        return self._around(lane, unit) if self.on else nullcontext()

    @contextmanager
    def _around(self, lane: Lane, unit: int):  # type: ignore[no-untyped-def]
        begin = Now()
        try:
            yield
        finally:
            self.add(lane, unit, begin, Now())
