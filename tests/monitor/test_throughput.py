"""Model FLOPs against figures worked out by hand, and the metrics that reach the logger."""

import lightning as L
import pytest
import torch
import transformers as tf
from torch import nn

from lightning_megatrain.monitor.throughput import TokenThroughput, matmul_flops, model_flops
from tests.conftest import LanguageModel, batches, loader, tiny_llama


def test_flops_of_plain_layers():
    net = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Linear(20, 30, bias=False))
    # the first input needs no gradient: 2 + 2 a weight there, 2 + 2 + 2 in the second
    assert model_flops(net, 7, 0) == 7 * (200 * 4 + 600 * 6)
    net[0].weight.requires_grad_(False)
    assert model_flops(net, 7, 0) == 7 * (200 * 2 + 600 * 4)
    net[0].weight.requires_grad_(True)
    net[1].weight.requires_grad_(False)
    assert model_flops(net, 7, 0) == 7 * (200 * 4 + 600 * 4)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_a_llama(tied):
    """6 PT without the lookup, and causal attention: 3 x 2 T d a token and layer."""
    model = tiny_llama(tie_word_embeddings=tied)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64
    by_hand = 6 * (2 * layer + 64 * 32) * 48 + 3 * 2 * 16 * 32 * 2 * 48
    assert model_flops(model, 48, 16) == by_hand


def test_of_experts_those_count_that_a_token_uses():
    fields = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
              "num_experts_per_tok": 2, "moe_intermediate_size": 16}  # fmt: skip
    four, eight = (model_flops(tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**fields, num_experts=n)), 16, 16) for n in (4, 8))
    assert eight - four == 6 * 16 * 32 * 4, "only the router is wider"


def test_the_matmul_rate_is_one():
    assert 1e8 < matmul_flops(torch.device("cpu"), torch.float32, size=256) < 1e15


def test_metrics_reach_the_logger(trainer):
    logged = {}

    class Memory(L.pytorch.loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None):
            logged.update(metrics)

    module = LanguageModel(tiny_llama())
    trainer(max_steps=6, logger=Memory(), log_every_n_steps=1, callbacks=[TokenThroughput(window_size=3)]).fit(module, loader(batches(6)))
    assert logged["train/device/items_per_sec"] > 0
    assert 0 < logged["train/device/mfu"] < 1
    assert module.flops_per_batch == model_flops(module, 32, 16)
