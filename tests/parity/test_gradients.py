"""Where gradients come from and go to: shared, gated, penalised, hooked, kept."""

import copy

import pytest
import torch
from torch import nn

from tests.conftest import LanguageModel, Squares, batches, loader, stack, tiny_llama

EMULATED = {"engine": "emulated", "emulated_jitter_seconds": 0.0005}
ENGINES = pytest.mark.parametrize("offload", [{}, EMULATED], ids=["direct", "emulated"])
STEPS = pytest.mark.parametrize("step", ["overlap_backward", "after_backward"])


def data(count=4):
    return [torch.randn(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(count)]


class Repeated(nn.Module):
    """One block, called three times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        return self.blocks[1](self.blocks[0](self.blocks[0](self.blocks[0](x))))


class TiedInside(nn.Module):
    """Two layers of one block share a weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class TiedAcross(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Loose(nn.Module):
    """Parameters on a container, and a norm outside of the blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Parameter(torch.randn(16))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        x = x + self.token
        for block in self.blocks:
            x = block(x)
        return self.norm(x * self.token)


class Statistics(nn.Module):
    """A bias that each forward moves, as routers that balance their load do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("bias", torch.zeros(16))

    def forward(self, x):
        y = self.linear(x) + self.bias
        if self.training:
            self.bias += 0.1 * y.detach().mean(0)
        return torch.tanh(y)


def moving():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(Statistics(), nn.BatchNorm1d(16)) for _ in range(3)])


def recurrent():
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x):
            return self.inner(x[:, None])[0][:, 0]

    return nn.Sequential(*[Block() for _ in range(3)])


NETS = {"repeated": Repeated, "tied inside": lambda: nn.Sequential(*[TiedInside() for _ in range(3)]), "tied across": TiedAcross, "loose": Loose, "moving": moving,
        "recurrent": recurrent, "mixed dtypes": lambda: _mixed()}  # fmt: skip


def _mixed():
    net = stack(3)
    net[1][0].bias = nn.Parameter(net[1][0].bias.detach().double(), requires_grad=False)

    class Cast(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return torch.tanh(nn.functional.linear(x, self.linear.weight) + self.linear.bias.float())

    return nn.Sequential(*[Cast(block[0]) for block in net])


@STEPS
@ENGINES
@pytest.mark.parametrize("net", NETS)
def test_nets_of_every_shape(compare, net, offload, step):
    compare(Squares(NETS[net]()), data(), offload=offload | {"optimizer_step": step})


@ENGINES
@pytest.mark.parametrize(
    "options", [{"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"accumulate_grad_batches": 2}]
)
def test_clipping_and_accumulation(compare, offload, options):
    module = LanguageModel(tiny_llama())
    compare(module, batches(6), offload=offload, **options)


@ENGINES
def test_a_penalty_on_weights_is_never_lost(trainer, offload):
    """The update may overlap backward: it has to wait for the gradient that does not come through the unit."""

    class Penalised(Squares):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0.01 * sum(p.square().sum() for p in self.parameters())

    ends = []
    for options in ({"offload": offload}, {"strategy": "auto"}):
        module = Penalised(stack())
        trainer(max_steps=4, **options).fit(module, loader(data()))
        ends.append(module.state_dict())
    for name, value in ends[1].items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-5, atol=1e-7)


@ENGINES
def test_a_gradient_that_the_user_kept_stays_what_it_was(trainer, offload):
    kept, copies = [], []

    class Keeps(Squares):
        def on_before_optimizer_step(self, optimizer):
            kept.append(self.net[1][0].weight.grad)
            copies.append(self.net[1][0].weight.grad.clone())

    trainer(max_steps=4, offload=offload).fit(Keeps(stack()), loader(data()))
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    assert not torch.equal(kept[0], kept[1])


@ENGINES
@pytest.mark.parametrize("step", ["auto", "overlap_backward"])
def test_hooks_on_tensors_see_each_gradient_once(trainer, offload, step):
    ends = []
    for options in ({"offload": offload | {"optimizer_step": step}}, {"strategy": "auto"}):
        module, seen = Squares(stack()), []
        module.net[1][0].weight.register_hook(lambda g, s=seen: s.append(("hook", g.norm().item())))
        module.net[2][0].weight.register_post_accumulate_grad_hook(lambda p, s=seen: s.append(("post", p.grad.norm().item())))
        trainer(max_steps=3, **options).fit(module, loader(data(3)))
        ends.append(seen)
    assert len(ends[1]) == 6
    assert ends[0] == ends[1]


@ENGINES
def test_frozen_parts_cost_no_gradient(trainer, offload):
    module = Squares(stack())
    module.net[0].requires_grad_(False)
    module.net[2].requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    run = trainer(max_steps=3, offload=offload)
    module.make = lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], lr=1e-2, fused=True)
    run.fit(module, loader(data(3)))
    assert {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])} == {
        f"net.{i}.0.{p}" for i in (1, 3) for p in ("weight", "bias")
    }
    assert all(p.grad is None for i in (0, 2) for p in module.net[i].parameters())
    assert len(run.optimizers[0].state) == 4


@ENGINES
def test_gradients_of_inputs_hold_no_more_than_the_pool(trainer, offload):
    """An adversarial step asks for the input's gradient only: no unit may stay on the device for weight gradients that never come."""
    held = []

    class Attack(Squares):
        def training_step(self, batch, batch_idx):
            x = batch.clone().requires_grad_()
            (g,) = torch.autograd.grad(self.net(x).square().mean(), x)
            if hasattr(self.trainer.strategy, "memory_report"):
                held.append(self.trainer.strategy.memory_report().device_slots_bytes)
            return super().training_step(batch + 0.1 * g.sign(), batch_idx)

    ends = []
    for options in ({"offload": offload}, {"strategy": "auto"}):
        module = Attack(stack(12))
        trainer(max_steps=3, **options).fit(module, loader(data(3)))
        ends.append(module.state_dict())
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())
    assert max(held) <= 4 * (16 * 16 + 32) * 4


@ENGINES
def test_second_derivatives_are_refused(trainer, offload):
    class Penalty(Squares):
        def training_step(self, batch, batch_idx):
            batch = batch.clone().requires_grad_()
            (g,) = torch.autograd.grad(self.net(batch).sum(), batch, create_graph=True)
            return g.square().mean()

    with pytest.raises(RuntimeError, match="create_graph"):
        trainer(max_steps=1, offload=offload).fit(Penalty(stack()), loader(data(1)))
