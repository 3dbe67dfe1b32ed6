"""Fuzz: random nets, buses, delays and settings against plain Lightning, bit for bit.

Each seed is one run and one case, so that a failure names what to run again; MEGATRAIN_CHAOS_SEEDS=500 looks longer.
"""

import copy
import os
import random
from functools import partial

import pytest
import torch
from torch import nn

from lightning_megatrain.host.machine import DEVICE_BYTES_VARIABLE
from tests.conftest import Squares, loader

SEEDS = int(os.environ.get("MEGATRAIN_CHAOS_SEEDS", "24"))
WIDTH = 16


class Block(nn.Module):
    """A residual block; `kind` says what is odd about it."""

    def __init__(self, kind: str, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if kind == "buffers" else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.2 if kind == "dropout" else 0.0)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Experts(nn.Module):
    """Each row goes to one of the experts: some get no row, and no gradient."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)  # torch's fused step rounds a rest below its vector length in another order
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None].to(out.dtype))
        return x + out


class Net(nn.Module):
    """Blocks in a row, of which some are called twice, some are skipped at random, and one may share a weight with another."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        kinds = [choose.choice(["plain", "plain", "dropout", "buffers", "experts"]) for _ in range(choose.randint(1, 9))]
        self.blocks = nn.ModuleList([Experts(choose.randint(2, 4)) if kind == "experts" else Block(kind, choose.choice([16, 32, 64])) for kind in kinds])
        self.again = {i for i in range(len(kinds)) if choose.random() < 0.15}
        self.layer_drop = choose.choice([0.0, 0.0, 0.3])
        plain = [block for block in self.blocks if isinstance(block, Block)]
        if len(plain) > 1 and choose.random() < 0.3:
            last = plain[-1]
            last.up.weight, last.down.weight = nn.Parameter(torch.randn(32, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH, 32) / 4)
            last.up.bias = nn.Parameter(torch.zeros(32))
            plain[0].up.weight, plain[0].up.bias, plain[0].down.weight = last.up.weight, last.up.bias, nn.Parameter(torch.randn(WIDTH, 32) / 4)
        for block in self.blocks:
            if choose.random() < 0.15:
                block.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x * self.scale
        for i, block in enumerate(self.blocks):
            if self.training and torch.rand(()) < self.layer_drop:
                continue
            for _ in range(2 if i in self.again else 1):
                x = block(x)
        return x


OTHERS = [
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.01),
    lambda p: torch.optim.RMSprop(p, lr=1e-3),
]
FUSED = [
    lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
]


def settings(choose: random.Random, net: Net) -> dict[str, object]:
    return {
        "engine": choose.choice(["emulated", "emulated", "emulated", "direct"]),
        "units": choose.choice(["auto", tuple(sorted({type(block).__name__ for block in net.blocks}))]),
        "prefetch_depth": choose.choice([0, 1, 2, 5]),
        "resident": choose.choice([0, "auto", 4000, 20_000, "1MiB"]),
        "optimizer_step": choose.choice(["auto", "after_backward", "overlap_forward"]),
        "activations": choose.choice(["device", "host"]),
        "recompute": choose.choice(["auto", "all", "none", 2]),
        "emulated_h2d_gbps": choose.choice([0.001, 0.1, 16.0]),
        "emulated_d2h_gbps": choose.choice([0.001, 0.1, 16.0]),
        "emulated_jitter_seconds": choose.choice([0.0, 0.0005, 0.002]),
    }


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_run_has_the_bits_of_plain_lightning(compare, monkeypatch, seed):
    choose = random.Random(seed)
    torch.manual_seed(seed)
    net = Net(choose)
    offload = settings(choose, net)
    options = choose.choice([{}, {}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3}])
    precision = choose.choice(["32-true", "32-true", "bf16-mixed"])
    if choose.random() < 0.5:
        monkeypatch.setenv(DEVICE_BYTES_VARIABLE, str(choose.choice([10_000, 100_000, 10_000_000])))
    # Lightning clips no fused optimizer under AMP
    make = choose.choice(OTHERS if precision == "bf16-mixed" and "gradient_clip_val" in options else OTHERS + FUSED)
    module = Squares(net, partial(_trained, make))
    data = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(choose.randint(3, 6))]
    print(f"seed {seed}: {offload} {options} {precision}\n{net}")  # pytest shows it where a seed fails
    compare(copy.deepcopy(module), data, offload=offload, precision=precision, **options)


def _trained(make, parameters):
    return make([p for p in parameters if p.requires_grad])


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_any_split_run_has_the_masters_of_a_run_in_place(trainer, seed):
    """bf16-true has no plain twin with an exact master: the oracle is the run without a bus, one update after each backward, nothing kept."""
    choose = random.Random(1000 + seed)
    torch.manual_seed(seed)
    net = Net(choose)
    options = choose.choice([{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}])
    offload = settings(choose, net) | {"moments": choose.choice(["fp32", "bf16"]), "master": choose.choice(["split", "split", "none"])}
    kept = {key: offload[key] for key in ("units", "moments", "master")}
    module = Squares(net, partial(_trained, choose.choice(OTHERS + FUSED)))
    data = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)]
    print(f"seed {seed}: {offload} {options}\n{net}")
    ends = []
    for policy in (offload, kept | {"engine": "direct", "optimizer_step": "after_backward", "recompute": "all"}):
        torch.manual_seed(5)
        run, twin = trainer(max_steps=len(data), precision="bf16-true", offload=policy, **options), copy.deepcopy(module)
        run.fit(twin, loader(data))
        ends.append((run.strategy.master_state_dict(), twin.losses))
    assert ends[0][1] == ends[1][1]
    assert all(torch.equal(ends[0][0][name], value) for name, value in ends[1][0].items())
