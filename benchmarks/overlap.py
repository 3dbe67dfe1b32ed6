"""How much of the copies and of the host step is hidden: `python benchmarks/overlap.py [--rounds 7] [--units 12]`.

1. A device that is not this machine's processor: units whose compute sleeps (forward 20 ms, backward forward-again + 40 ms), behind the emulated bus whose
   copies take 50%, 80%, 100% and 200% of a unit's forward. The step against its floor,
   max(forward compute, copies in) + max(backward compute, copies in, copies out), from the sleeps, the bytes that crossed and the bus's rate.
2. Real compute on one core, the host step on the other: what share of the host step `overlap_backward` and `overlap_forward` hide.

Settings take turns within each round; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
from common import Run, Stack, save, show, turns
from torch import Tensor, nn

from lightning_megatrain.monitor.timeline import Step
from lightning_megatrain.policy import StepMode
from lightning_megatrain.stream.record import Lane

FORWARD_SECONDS = 0.020
WEIGHTS = 250_000  # of a sleeping unit: 1 MB in fp32, so that the emulated copies themselves take no core's time to speak of
MODES = [mode.value for mode in (StepMode.AFTER_BACKWARD, StepMode.OVERLAP_BACKWARD, StepMode.OVERLAP_FORWARD)]


_slept: list[float] = []


def slept(seconds: float) -> None:
    start = time.perf_counter()
    time.sleep(seconds)
    _slept.append(time.perf_counter() - start)  # sleeps take longer than asked for, by what the system likes


class Elsewhere(torch.autograd.Function):
    """Compute on a device that takes none of this machine's cores."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        ctx.save_for_backward(x)
        slept(FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        _ = ctx.saved_tensors  # what is asked for is what runs the forward again
        slept(2 * FORWARD_SECONDS)
        return gradients[0], ctx.gradient, None


class Core(nn.Module):
    def __init__(self, gradient: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(gradient.shape))
        self.gradient = gradient

    def forward(self, x: Tensor) -> Tensor:
        return Elsewhere.apply(x, self.weight, self.gradient)  # type: ignore[no-any-return]


class Sleeper(nn.Module):
    """A block: what has submodules may run forward again."""

    def __init__(self, gradient: Tensor) -> None:
        super().__init__()
        self.core = Core(gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x)  # type: ignore[no-any-return]


class Worker(nn.Module):
    """An MLP whose products take about as long on one core as its update on another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def floor(step: Step, units: int, gbps: float) -> float:
    """Of the step just taken: compute from the sleeps, copies from what crossed in each pass, at the bus's rate."""
    turn = min(p.begin for p in step.pieces if p.lane is Lane.COMPUTE and p.backward)
    inward = {back: sum(p.nbytes for p in step.pieces if p.lane is Lane.TO_DEVICE and (p.begin >= turn) == back) / gbps / 1e9 for back in (False, True)}
    outward = sum(p.nbytes for p in step.pieces if p.lane is Lane.TO_HOST) / gbps / 1e9
    return max(sum(_slept[:units]), inward[False]) + max(sum(_slept[units:]), inward[True], outward)


def against_the_floor(units: int, rounds: int, percents: list[int]) -> dict[str, dict[str, float]]:
    gradient = torch.full((WEIGHTS,), 1e-3)
    runs, rates = {}, {}
    for percent in percents:
        gbps = 4 * WEIGHTS / 1e9 / (FORWARD_SECONDS * percent / 100)
        for mode in MODES:
            key = (percent, mode)
            rates[key] = gbps
            stack = Stack([Sleeper(gradient) for _ in range(units)])
            policy = {"engine": "emulated", "recompute": "all", "resident": 0, "emulated_h2d_gbps": gbps, "emulated_d2h_gbps": gbps}
            runs[key] = Run(stack, torch.ones(8, requires_grad=True), StepMode(mode), **policy)
            for _ in range(2):  # the first step learns the order
                runs[key].step()

    def timed(run: Run, gbps: float) -> tuple[float, float]:
        _slept.clear()
        took = run.step()
        run.engine.begin("train", mode=run.mode)  # completes the record of that step
        return took, took / floor(run.recorded(), units, gbps)

    taken = turns(rounds, {key: partial(timed, run, rates[key]) for key, run in runs.items()}, "against the floor")
    for run in runs.values():
        run.close()
    rows, figures = [], {}
    for percent in percents:
        figures[str(percent)] = {mode: statistics.median(ratio for _, ratio in taken[percent, mode]) for mode in MODES}
        medians = {mode: statistics.median(seconds for seconds, _ in taken[percent, mode]) for mode in MODES}
        rows.append([f"{percent}%", *(f"{medians[mode]:.3f} s  {figures[str(percent)][mode]:.2f}" for mode in MODES)])
    show(f"one step of {units} units against its floor", ["a copy takes, of a forward", *(f"{mode}: step, times floor" for mode in MODES)], rows)
    return figures


def hidden_share(units: int, rounds: int, width: int, tokens: int) -> dict[str, float]:
    """The step's seconds saved, of the seconds that the update takes where nothing else runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
        runs = {
            mode: Run(
                Stack([Worker(width) for _ in range(units)]),
                x.clone().requires_grad_(),
                StepMode(mode),
                engine="emulated",
                recompute="all",
                emulated_h2d_gbps=1000.0,
                emulated_d2h_gbps=1000.0,
            )
            for mode in MODES
        }

        def timed(run: Run) -> tuple[float, float]:
            took = run.step()
            run.engine.begin("train", mode=run.mode)
            return took, run.recorded().busy(Lane.UPDATE)

        taken = turns(rounds, {mode: partial(timed, run) for mode, run in runs.items()}, "the host step", warmup=2)
        for run in runs.values():
            run.close()
    finally:
        torch.set_num_threads(threads)
    step = statistics.median(update for _, update in taken[MODES[0]])
    seconds = {mode: [took for took, _ in taken[mode]] for mode in MODES}
    saved = {mode: statistics.median(a - m for a, m in zip(seconds[MODES[0]], seconds[mode], strict=True)) / step for mode in MODES[1:]}
    rows = [[MODES[0], f"{statistics.median(seconds[MODES[0]]):.3f} s, of which {step:.3f} s update", ""]]
    rows += [[mode, f"{statistics.median(seconds[mode]):.3f} s", f"{saved[mode]:.0%}"] for mode in MODES[1:]]
    show(f"compute on one core, host step on the other: {units} units of {8 * width * width / 1e6:.1f}M", ["", "step", "of the host step is hidden"], rows)
    return {"update_seconds": step, **{f"hidden_{mode}": saved[mode] for mode in MODES[1:]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--percents", type=int, nargs="+", default=[50, 80, 100, 200])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    figures: dict[str, Any] = {"units": options.units, "rounds": options.rounds}
    figures["times_floor_by_copy_percent"] = against_the_floor(options.units, options.rounds, options.percents)
    figures["host_step"] = hidden_share(options.units, options.rounds, options.width, options.tokens)
    save("overlap", figures)


if __name__ == "__main__":
    main()
