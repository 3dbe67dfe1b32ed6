"""What a step costs as depth and width grow: `python benchmarks/scaling.py [--rounds 7]`.

1. Python's own cost: 64 units of no work, against the same modules in plain torch (with torch's own checkpointing where units recompute).
2. Llama decoder layers of width 512, 128 tokens, depth 2 to 64: seconds a layer, bytes a parameter, and bytes on the (emulated) device.
3. Width 128 to 1024 at depth 8: nanoseconds a parameter and token.

Settings take turns within each round; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import Run, Stack, save, show, turns
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from lightning_megatrain.policy import StepMode

TOKENS = 128
WARMUP = 3
MODE = StepMode.OVERLAP_BACKWARD


class Scale(nn.Module):
    """As little work as a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Idle(nn.Module):
    """A block of no work: what has submodules may run forward again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A Llama decoder layer that takes hidden states only."""

    def __init__(self, config: LlamaConfig, angles: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.layer = LlamaDecoderLayer(config, 0)
        self.angles = angles

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x, position_embeddings=self.angles)
        return out[0] if isinstance(out, tuple) else out


def layers(width: int, depth: int) -> Stack:
    config = LlamaConfig(hidden_size=width, intermediate_size=width * 8 // 3 // 8 * 8, num_attention_heads=width // 64, num_key_value_heads=width // 64,
                         num_hidden_layers=depth, attn_implementation="sdpa")  # fmt: skip
    angles = LlamaRotaryEmbedding(config)(torch.empty(1, TOKENS, width), torch.arange(TOKENS)[None])
    torch.manual_seed(0)
    return Stack([Layer(config, angles) for _ in range(depth)])


def own_cost(rounds: int, units: int = 64) -> dict[str, float]:
    """Microseconds a unit and pass of forward and backward, beyond what the same modules take in plain torch."""
    x = torch.ones(8, requires_grad=True)

    def plain(again: bool) -> Callable[[], float]:
        stack = Stack([Idle() for _ in range(units)])

        def step() -> float:
            start = time.perf_counter()
            y = x
            for block in stack.blocks:
                y = checkpoint(block, y, use_reentrant=False) if again else block(y)
            y.sum().backward()
            return time.perf_counter() - start

        return step

    def streamed(run: Run) -> Callable[[], float]:
        def step() -> float:
            run.engine.begin("train")
            start = time.perf_counter()
            run.model(run.x).sum().backward()
            took = time.perf_counter() - start
            run.optimizer.zero_grad()
            return took

        return step

    bus = {"emulated_h2d_gbps": 1e6, "emulated_d2h_gbps": 1e6}
    kinds = [(engine, recompute) for engine in ("direct", "emulated") for recompute in ("none", "all")]
    runs = {kind: Run(Stack([Idle() for _ in range(units)]), x, StepMode.AFTER_BACKWARD, engine=kind[0], recompute=kind[1], **bus) for kind in kinds}
    steps = {("plain", "none"): plain(False), ("plain", "all"): plain(True), **{kind: streamed(run) for kind, run in runs.items()}}
    seconds = turns(8 * rounds, steps, "units of no work", WARMUP)
    for run in runs.values():
        run.close()
    rows, figures = [], {}
    for engine, recompute in kinds:
        passes = 2 if recompute == "none" else 3
        own = statistics.median(a - b for a, b in zip(seconds[engine, recompute], seconds["plain", recompute], strict=True)) / units / passes * 1e6
        base = statistics.median(seconds["plain", recompute]) / units / passes * 1e6
        figures[f"{engine}_recompute_{recompute}_us"] = own
        rows.append([engine, recompute, f"{base:.0f} us", f"{own:.0f} us"])
    show(f"Python's own cost, a unit and pass ({units} units of no work)", ["engine", "recompute", "plain torch", "ours beyond it"], rows)
    return figures


def by_depth(rounds: int, depths: list[int]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for engine in ("direct", "emulated"):
        x = torch.randn(1, TOKENS, 512, requires_grad=True)
        runs = {depth: Run(layers(512, depth), x, MODE, engine=engine, recompute="all", emulated_h2d_gbps=50.0, emulated_d2h_gbps=50.0) for depth in depths}
        seconds = turns(rounds, {depth: run.step for depth, run in runs.items()}, f"depth, {engine} engine", WARMUP)
        rows = []
        base = 8 if 8 in depths else depths[0]
        for depth, run in runs.items():
            report = run.engine.memory_report()
            per_layer = statistics.median(seconds[depth]) / depth
            ratio = statistics.median((a / depth) / (b / base) for a, b in zip(seconds[depth], seconds[base], strict=True))
            device, host = report.device_bytes, report.bytes_per_parameter
            figures[f"{engine}_{depth}"] = {"seconds_a_layer": per_layer, f"times_depth_{base}": ratio, "host_bytes_a_parameter": host, "device_bytes": device}
            rows.append([str(depth), f"{report.parameters / 1e6:.0f}M", f"{per_layer * 1e3:.1f} ms", f"{ratio:.3f}", f"{host:.2f}", f"{device / 1e6:.1f} MB"])
            run.close()
        show(f"depth, {engine} engine: layers of width 512, {TOKENS} tokens",
             ["layers", "parameters", "a layer", f"times depth {base}", "host bytes a parameter", "slots and slabs on the device"], rows)  # fmt: skip
    return figures


def by_width(rounds: int, widths: list[int]) -> dict[str, float]:
    runs = {
        width: Run(layers(width, 8), torch.randn(1, TOKENS, width, requires_grad=True), MODE, engine="direct", recompute="all") for width in widths
    }  # fmt: skip
    seconds = turns(rounds, {width: run.step for width, run in runs.items()}, "width", WARMUP)
    rows, figures = [], {}
    for width, run in runs.items():
        count = sum(p.numel() for p in run.model.parameters())
        figures[str(width)] = statistics.median(seconds[width]) / count / TOKENS * 1e9
        rows.append([str(width), f"{count / 1e6:.1f}M", f"{statistics.median(seconds[width]) * 1e3:.0f} ms", f"{figures[str(width)]:.3f} ns"])
        run.close()
    show(f"width: 8 layers, {TOKENS} tokens, direct engine", ["width", "parameters", "step", "a parameter and token"], rows)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512, 1024])
    options = parser.parse_args()
    figures: dict[str, Any] = {"rounds": options.rounds, "own_cost": own_cost(options.rounds)}
    figures["depth"] = by_depth(options.rounds, options.depths)
    figures["width_ns_a_parameter_and_token"] = by_width(options.rounds, options.widths)
    save("scaling", figures)


if __name__ == "__main__":
    main()
