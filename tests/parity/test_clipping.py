"""Clipping by norm inside the step: norms taken while gradients land, the factor applied in the kernel; bit for bit what Lightning does, whoever looks."""

import copy

import lightning as L
import pytest
import torch

from lightning_megatrain.stream.landing import GradientLander
from tests.conftest import LanguageModel, batches, loader, tiny_llama

CLIP = {"gradient_clip_val": 0.05}
POLICIES = {
    "direct": {"optimizer_step": "after_backward"},
    "emulated": {"engine": "emulated", "optimizer_step": "after_backward"},
    "forward": {"engine": "emulated", "optimizer_step": "overlap_forward", "emulated_jitter_seconds": 0.0005},
}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


@pytest.fixture
def lightnings_own(monkeypatch):
    """Counts calls of torch's clip_grad_norm_ in runs of the strategy, and norms that were taken again on the host."""
    found = {"clipped": 0, "landed": 0}
    torchs, norm = torch.nn.utils.clip_grad_norm_, GradientLander.norm

    def clip(*args, **kwargs):
        found["clipped"] += 1
        return torchs(*args, **kwargs)

    def landed(self, parameter):
        own = self._gradients[self._store.unit_of(parameter).unit.index]
        found["landed"] += id(parameter) in own.norms
        return norm(self, parameter)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    monkeypatch.setattr(GradientLander, "norm", landed)
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_bits_are_those_of_plain_lightning(compare, policy, name, tied, accumulate):
    model = tiny_llama(num_hidden_layers=3, tie_word_embeddings=tied)
    compare(LanguageModel(model, OPTIMIZERS[name]), batches(6), offload=POLICIES[policy], accumulate_grad_batches=accumulate, **CLIP)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_step_clips_where_nobody_looks(trainer, lightnings_own, policy):
    module = LanguageModel(tiny_llama())
    trainer(max_steps=3, offload=POLICIES[policy], **CLIP).fit(module, loader(batches(3)))
    assert lightnings_own == {"clipped": 0, "landed": 3 * (len(list(module.parameters())) - 1)}  # the final norm is a leftover, no unit
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_bound_changes_nothing(trainer, policy):
    ends = []
    for options in ({"gradient_clip_val": 1e9}, {}):
        module = LanguageModel(tiny_llama())
        trainer(max_steps=3, offload=POLICIES[policy], **options).fit(module, loader(batches(3)))
        ends.append(module.losses)
    assert ends[0] == ends[1]


class Looks(LanguageModel):
    """Reads the clipped gradients after the step."""

    def on_train_batch_end(self, *_):
        self.losses.append(max(float(p.grad.abs().max()) for p in self.parameters()))


class Rescales(LanguageModel):
    """Changes gradients behind autograd's back."""

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.data.mul_(0.5)


class Freezes(LanguageModel):
    """Drops some gradients: they count neither in the norm nor in the step."""

    def on_before_optimizer_step(self, optimizer):
        next(iter(self.parameters())).grad = None


class Configures(LanguageModel):
    """Clips in its own way."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="norm")
        self.losses.append(max(float(p.grad.abs().max()) for p in self.parameters()))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [Looks, Rescales, Freezes, Configures])
def test_who_looks_sees_what_lightning_shows(compare, policy, kind):
    compare(kind(tiny_llama()), batches(4), offload=POLICIES[policy], **CLIP)


@pytest.mark.parametrize("policy", POLICIES)
def test_values_are_clipped_by_lightning(compare, policy):
    compare(LanguageModel(tiny_llama()), batches(4), offload=POLICIES[policy], gradient_clip_val=0.001, gradient_clip_algorithm="value")


def test_the_precision_plugin_is_given_back(trainer):
    run = trainer(max_steps=1, **CLIP)
    run.fit(copy.deepcopy(LanguageModel(tiny_llama())), loader(batches(1)))
    assert "clip_grad_by_norm" not in vars(run.strategy.precision_plugin)
    assert isinstance(run, L.Trainer)
