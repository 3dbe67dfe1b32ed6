"""Shared by all tests: tiny models, quiet trainers, and plain Lightning as the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_megatrain as mt

torch.set_num_threads(2)


def tiny_llama(**fields: Any) -> nn.Module:
    """Llama with 64 tokens, 32 wide, 2 layers; seed 0."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "use_cache": False, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(options | fields)))


def batches(count: int = 4, rows: int = 2, tokens: int = 16, vocabulary: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (rows, tokens), generator=generator) for _ in range(count)]


def loader(items: Iterable[Any]) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(list(items), batch_size=None)  # type: ignore[arg-type]


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class LanguageModel(L.LightningModule):
    """Any Hugging Face causal language model on batches of token ids."""

    def __init__(self, model: nn.Module, make: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        self.model = model
        self.make = make or (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


class ValidatedModel(LanguageModel):
    """With a validation step."""

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)


class Squares(L.LightningModule):
    """The mean square of a net's output."""

    def __init__(self, net: nn.Module, make: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        self.net = net
        self.make = make or (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


def stack(count: int = 4, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)])


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    """Makes a quiet CPU trainer; keyword `offload` gives fields of the policy, `strategy="auto"` is plain Lightning."""

    def make(**options: Any) -> L.Trainer:
        offload = options.pop("offload", {})
        options.setdefault("strategy", mt.MegaTrainStrategy(offload=offload) if options.get("strategy") is None else None)
        defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
                    "enable_model_summary": False, "default_root_dir": tmp_path, "num_sanity_val_steps": 0}  # fmt: skip
        return L.Trainer(**(defaults | options))

    return make


@pytest.fixture
def compare(trainer: Callable[..., L.Trainer]) -> Callable[..., None]:
    """Fits copies of a module under the strategy and under plain Lightning: weights and losses have the same bits."""

    def run(module: Any, data: list[Any], *, offload: dict[str, Any] | None = None, **options: Any) -> None:
        ends = []
        for extra in ({"offload": offload or {}}, {"strategy": "auto"}):
            twin = copy.deepcopy(module)
            torch.manual_seed(5)
            trainer(max_steps=len(data), **options, **extra).fit(twin, loader(data))
            ends.append((weights(twin), twin.losses))
        ours, plain = ends
        assert plain[1][0] != plain[1][-1], "the oracle learned nothing"
        assert ours[1] == plain[1]
        for name, value in plain[0].items():
            assert torch.equal(ours[0][name], value), f"{name}: largest difference {(ours[0][name] - value).abs().max():.3e}"

    return run
