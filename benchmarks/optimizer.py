"""The host step against the memory's own rate and its peers, interleaved in one run: `python benchmarks/optimizer.py [--millions 64] [--rounds 9]`.

The floor is an in-place read-modify-write of as many bytes as the split-master step moves (26 a parameter), in the same threads; every other step is
compared by the bytes that it moves itself. The peers compute the same: a bf16 gradient steps an fp32 master, and bf16 weights come out.
DeepSpeedCPUAdam (pip install deepspeed ninja) is left out, with a line, where it can't be built.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from common import save, show, turns
from torch import Tensor

from lightning_megatrain.host.buffer import HostBuffer, Lane
from lightning_megatrain.optim.kernel import AdamScalars, AdamSegment, HostKernel, SgdScalars, SgdSegment

OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
ADAM = AdamScalars(1e-4, 0.9, 0.999, 1e-8, 0.1, True, 3, clip=0.9)
SGD = SgdScalars(1e-4, 0.9, 0.0, 0.1, nesterov=False, first=False, clip=0.9)
FLOOR, OURS = "read-modify-write (floor)", "AdamW, split master"


def plane(count: int, dtype: torch.dtype, lane: Lane) -> Tensor:
    """Memory as the store allocates it. The peers' is torch's own, as in their use."""
    return HostBuffer(count * dtype.itemsize, lane=lane).tensor(0, dtype, (count,))


def candidates(count: int, kernel: HostKernel) -> dict[str, tuple[int, Callable[[], object]]]:
    """Bytes that one step of each reads and writes a parameter, and the step; every candidate has its own state, as it would in use."""
    f32, bf16 = torch.float32, torch.bfloat16
    gradient, gradient32 = plane(count, bf16, Lane.GRADIENTS).normal_(), plane(count, f32, Lane.GRADIENTS).normal_()
    moved = plane(count * 13, torch.uint8, Lane.WEIGHTS).zero_()  # read and written: 26 bytes a parameter

    def adam(master: str, moments: torch.dtype) -> Callable[[], object]:
        segment = AdamSegment(*weight(master), *(plane(count, moments, lane).zero_() for lane in (Lane.EXP_AVG, Lane.EXP_AVG_SQ)), ADAM)
        return lambda: kernel.step([segment])

    def sgd(master: str) -> Callable[[], object]:
        segment = SgdSegment(*weight(master), plane(count, f32, Lane.EXP_AVG).zero_(), SGD)
        return lambda: kernel.step([segment])

    def weight(master: str) -> tuple[Tensor, Tensor | None, Tensor]:
        trail = plane(count, torch.int16, Lane.TRAIL) if master == "split" else None
        return plane(count, f32 if master == "fp32" else bf16, Lane.WEIGHTS).normal_(), trail, gradient32 if master == "fp32" else gradient

    found: dict[str, tuple[int, Callable[[], object]]] = {
        FLOOR: (26, lambda: kernel.read_modify_write(moved)),
        OURS: (26, adam("split", f32)),
        "AdamW, split master, bf16 moments": (18, adam("split", bf16)),
        "AdamW, fp32": (28, adam("fp32", f32)),
        "AdamW, bf16 without master, bf16 moments": (14, adam("none", bf16)),
        "SGD with momentum, split master": (18, sgd("split")),
        "SGD with momentum, fp32": (20, sgd("fp32")),
    }
    fused = torch.nn.Parameter(torch.randn(count))
    fused.grad = torch.empty(count)
    low = torch.empty(count, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([fused], fused=True, **OPTIONS)

    def torch_step() -> None:
        fused.grad.copy_(gradient)
        optimizer.step()
        low.copy_(fused.detach())

    # gradient cast 2 + 4, weight 8, moments 16, gradient 4, bf16 weights 4 + 2
    found["torch AdamW(fused=True), fp32 master"] = (40, torch_step)
    peer = deepspeed_step(count, gradient)
    if peer is not None:
        found["DeepSpeedCPUAdam, fp32 master"] = (40, peer)
    return found


def deepspeed_step(count: int, gradient: Tensor) -> Callable[[], object] | None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        master = torch.nn.Parameter(torch.randn(count))
        master.grad = torch.empty_like(master)
        optimizer = DeepSpeedCPUAdam([master], **OPTIONS)
    except Exception as error:  # not installed, no ninja, no compiler: the table says so
        print(f"DeepSpeedCPUAdam is left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None
    low = torch.empty(count, dtype=torch.bfloat16)

    def step() -> None:
        master.grad.copy_(gradient)
        optimizer.step()
        low.copy_(master.detach())

    return step


def _timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=64, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    count = options.millions * 2**20
    with HostKernel() as kernel:
        steps = candidates(count, kernel)
        seconds = turns(options.rounds, {name: partial(_timed, step) for name, (_, step) in steps.items()}, "one step each", warmup=2)  # touches all memory
    floor, ours = seconds[FLOOR], seconds[OURS]
    rows, figures = [], {}
    for name, values in seconds.items():
        moved = steps[name][0]
        of_floor = statistics.median(f * moved / 26 / s for f, s in zip(floor, values, strict=True))
        against = statistics.median(s / o for s, o in zip(values, ours, strict=True))
        figures[name] = {"milliseconds": statistics.median(values) * 1000, "bytes_moved": moved, "of_the_floors_rate": of_floor, "times_ours": against}
        rows.append([name, f"{statistics.median(values) * 1000:.0f} ms", str(moved), f"{of_floor:.2f}", f"{against:.2f}"])
    rate = 26 * count / statistics.median(floor) / 1e9
    show(
        f"one step of {options.millions}M parameters, {kernel.threads} threads, floor {rate:.1f} GB/s",
        ["", "median", "bytes moved a parameter", "of the floor's rate", "times split master"],
        rows,
    )
    save("optimizer", {"parameters": count, "threads": kernel.threads, "floor_gbps": rate, "median_of_rounds": options.rounds, "steps": figures})


if __name__ == "__main__":
    main()
