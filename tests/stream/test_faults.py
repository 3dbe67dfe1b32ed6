"""What goes wrong in a thread is raised in the training loop, every thread ends, and the module trains on afterwards."""

import copy
import os
import signal
import threading
import time

import pytest
import torch

from lightning_megatrain.optim.kernel import HostKernel
from lightning_megatrain.stream import engines
from tests.conftest import Squares, loader, stack, weights

DATA = [torch.randn(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]
MODES = pytest.mark.parametrize("mode", ["after_backward", "overlap_backward", "overlap_forward"])


def policy(mode):
    return {"engine": "emulated", "optimizer_step": mode, "emulated_h2d_gbps": 0.01, "emulated_d2h_gbps": 0.01, "emulated_jitter_seconds": 0.0005}


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megatrain")]


def fits_as_plain(trainer, module, mode):
    """The module is whole: from where it is, it trains as under plain Lightning."""
    ends = []
    for extra in ({"offload": policy(mode)}, {"strategy": "auto"}):
        twin = copy.deepcopy(module)
        trainer(max_steps=len(DATA), **extra).fit(twin, loader(DATA))
        ends.append(weights(twin))
    assert all(value.isfinite().all() for value in ends[1].values())
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def failing(monkeypatch, owner, name, at):
    """The `at`-th call of a method of the pipeline dies."""
    original, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(None)
        if len(calls) == at:
            raise OSError("the bus burst")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@MODES
@pytest.mark.parametrize("at", [1, 2, 9, 23])
@pytest.mark.parametrize(("owner", "name"), [(engines.ThreadStream, "_copy"), (engines.ctypes, "memset"), (HostKernel, "step")], ids=["copy", "poison", "step"])
def test_a_fault_in_any_thread_is_raised_and_leaves_nothing_behind(trainer, monkeypatch, mode, owner, name, at):
    module = Squares(stack())
    with monkeypatch.context() as patch:
        failing(patch, owner, name, at)
        with pytest.raises((RuntimeError, OSError), match="the bus burst"):
            trainer(max_steps=len(DATA), offload=policy(mode)).fit(module, loader(DATA))
    assert not threads()
    fits_as_plain(trainer, module, mode)


@MODES
@pytest.mark.parametrize("delay", [0.0, 0.003, 0.007, 0.011, 0.02, 0.031])
def test_an_interrupt_at_any_moment_ends_all_threads(trainer, mode, delay):
    """Ctrl-C, as the terminal sends it."""

    class Interrupted(Squares):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                threading.Thread(target=interrupt, daemon=True).start()
            return super().training_step(batch, batch_idx)

    def interrupt():
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    module = Interrupted(stack())
    endless = [DATA[i % len(DATA)] for i in range(100_000)]
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer(max_epochs=1, offload=policy(mode)).fit(module, loader(endless))
    assert not threads()
    fits_as_plain(trainer, Squares(module.net), mode)
