"""The host step against the memory's own rate and its peers, interleaved in one run: `python benchmarks/optimizer.py [--millions 64] [--rounds 9]`.

The floor is an in-place read-modify-write of as many bytes as the split-master step moves (26 a parameter), in the same threads. The peers compute the
same: a bf16 gradient steps an fp32 master, and bf16 weights come out. DeepSpeedCPUAdam (pip install deepspeed ninja) is left out, with a line, where it
can't be built.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from common import save, show
from torch import Tensor

from lightning_megatrain.host.buffer import HostBuffer, Lane
from lightning_megatrain.optim.kernel import AdamScalars, AdamSegment, HostKernel

OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SCALARS = AdamScalars(1e-4, 0.9, 0.999, 1e-8, 0.1, True, 3)


def plane(count: int, dtype: torch.dtype, lane: Lane) -> Tensor:
    """Memory as the store allocates it. The peers' is torch's own, as in their use."""
    return HostBuffer(count * dtype.itemsize, lane=lane).tensor(0, dtype, (count,))


def candidates(count: int, kernel: HostKernel) -> dict[str, Callable[[], object]]:
    """One step of each; every candidate has its own state, as it would in use."""
    gradient, gradient32 = plane(count, torch.bfloat16, Lane.GRADIENTS).normal_(), plane(count, torch.float32, Lane.GRADIENTS).normal_()
    moved = plane(count * 13, torch.uint8, Lane.WEIGHTS).zero_()  # read and written: 26 bytes a parameter
    moments = [plane(count, torch.float32, lane) for lane in (Lane.EXP_AVG, Lane.EXP_AVG_SQ) * 2]
    split = AdamSegment(plane(count, torch.bfloat16, Lane.WEIGHTS).normal_(), plane(count, torch.int16, Lane.TRAIL), gradient, moments[0], moments[1], SCALARS)
    whole = AdamSegment(plane(count, torch.float32, Lane.WEIGHTS).normal_(), None, gradient32, moments[2], moments[3], SCALARS)
    found: dict[str, Callable[[], object]] = {
        "read-modify-write (floor)": lambda: kernel.read_modify_write(moved),
        "HostAdamW, split master": lambda: kernel.step([split]),
        "HostAdamW, fp32": lambda: kernel.step([whole]),
    }
    fused = torch.nn.Parameter(torch.randn(count))
    fused.grad = torch.empty(count)
    low = torch.empty(count, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([fused], fused=True, **OPTIONS)

    def torch_step() -> None:
        fused.grad.copy_(gradient)
        optimizer.step()
        low.copy_(fused.detach())

    found["torch AdamW(fused=True), fp32 master"] = torch_step
    peer = deepspeed_step(count, gradient)
    if peer is not None:
        found["DeepSpeedCPUAdam, fp32 master"] = peer
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=64, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    count = options.millions * 2**20
    with HostKernel() as kernel:
        steps = candidates(count, kernel)
        for step in steps.values():  # touch all memory
            step()
            step()
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
    floor, ours = seconds["read-modify-write (floor)"], seconds["HostAdamW, split master"]
    rows, figures = [], {}
    for name, values in seconds.items():
        of_floor = statistics.median(f / s for f, s in zip(floor, values, strict=True))
        against = statistics.median(s / o for s, o in zip(values, ours, strict=True))
        figures[name] = {"milliseconds": statistics.median(values) * 1000, "of_the_floors_rate": of_floor, "times_ours": against}
        rows.append([name, f"{statistics.median(values) * 1000:.0f} ms", f"{of_floor:.2f}", f"{against:.2f}"])
    rate = 26 * count / statistics.median(floor) / 1e9
    show(
        f"one AdamW step of {options.millions}M parameters, {kernel.threads} threads, floor {rate:.1f} GB/s",
        ["", "median", "of the floor's rate", "times ours"],
        rows,
    )
    save("optimizer", {"parameters": count, "threads": kernel.threads, "floor_gbps": rate, "median_of_rounds": options.rounds, "steps": figures})


if __name__ == "__main__":
    main()
