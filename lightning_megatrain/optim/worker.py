"""`StepWorker`: one thread that updates units beside the device's work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class StepWorker:
    """Runs updates in the order in which they were given. An error is raised in the thread that waits, with its traceback.

    The thread starts with the first update and ends with `close()`.
    """

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, update: Callable[[], None]) -> None:
        """Give one update; raises what an earlier one died of."""
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="megatrain-step", daemon=True)
            self._thread.start()
        self._work.put(update)

    def wait(self) -> None:
        """Block until every update given so far is done; raises what one of them died of."""
        self._work.join()
        self.check()

    def _run(self) -> None:
        while (update := self._work.get()) is not None:
            try:
                update()
            except BaseException as error:
                self._error = self._error or error
            finally:
                del update  # it holds gradients
                self._work.task_done()
        self._work.task_done()

    def check(self) -> None:
        """Raise what an update died of."""
        if self._error is not None:
            raise RuntimeError(f"updating weights on the host failed: {type(self._error).__name__}: {self._error}") from self._error

    def close(self) -> None:
        """Finish what was given and end the thread. Idempotent."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
        self._error = None
