"""`DeferredUpdates`: weight updates that wait until the next forward needs them.

The step of `overlap_forward`: when the optimizer steps, everything an update depends on (clipped gradients, learning rate, step count) is fixed, and what is
left is arithmetic on a unit's own memory. It may run any time before somebody reads the unit. Who reads it calls `ensure`, or is made to by a `WeightGuard`;
who reads everything calls `flush`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torch import nn

from lightning_megatrain.optim.guard import WeightGuard
from lightning_megatrain.optim.worker import StepWorker

Update = Callable[[], None]


class DeferredUpdates:
    """Updates by unit, each run once.

    Args:
        worker: runs them in the order in which they will be needed; None runs each when it is asked for (the device is the CPU, whose cores are taken).
        parameters: those of a unit, which ask by themselves when somebody reads them.
    """

    def __init__(self, worker: StepWorker | None, parameters: Callable[[int], list[nn.Parameter]] = lambda unit: []) -> None:
        self._worker = worker
        self._guard = WeightGuard(parameters, self.ensure)
        self._lock = threading.RLock()  # a reader may be in any thread
        self._waiting: dict[int, Update] = {}
        self._done: dict[int, threading.Event] = {}

    @property
    def pending(self) -> bool:
        """Whether some unit may not be up to date."""
        return bool(self._waiting) or bool(self._done)

    def put(self, unit: int, update: Update) -> None:
        """Defer a unit's update. An earlier one of the unit is run first."""
        self.ensure(unit)
        self._waiting[unit] = update
        self._guard.close(unit)

    def start(self, order: Iterable[int]) -> None:
        """Give all that waits to the worker, first what is needed first."""
        if self._worker is None:
            return
        for unit in [*dict.fromkeys(order), *self._waiting]:
            update = self._waiting.pop(unit, None)
            if update is not None:
                done = self._done[unit] = threading.Event()
                self._worker.submit(_then(update, done))

    def ready(self, unit: int) -> bool:
        """Whether a unit is up to date, without waiting."""
        if unit in self._waiting or (unit in self._done and not self._done[unit].is_set()):
            return False
        self.ensure(unit)
        return True

    def ensure(self, unit: int) -> None:
        """Bring one unit up to date."""
        with self._lock:
            update = self._waiting.pop(unit, None)
            done = self._done.pop(unit, None)
            if update is None and done is None:
                return
            try:
                if update is not None:
                    update()
                if done is not None:
                    done.wait()
                    assert self._worker is not None
                    self._worker.check()
            finally:
                self._guard.open(unit)

    def flush(self) -> None:
        """Bring every unit up to date; raises what an update died of."""
        errors = []
        for unit in [*self._waiting, *self._done]:
            try:
                self.ensure(unit)
            except Exception as error:  # the others must not stay as they are
                errors.append(error)
        if errors:
            raise errors[0]


def _then(update: Update, done: threading.Event) -> Update:
    def run() -> None:
        try:
            update()
        finally:
            done.set()  # whoever waits must not hang: it asks the worker for the error

    return run
