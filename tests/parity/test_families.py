"""The same bits as plain Lightning, by family, precision and engine."""

import pytest
import torch
import transformers as tf

from tests.conftest import LanguageModel, batches, tiny_llama

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
         "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
FAMILIES = {
    "llama": lambda: tiny_llama(),
    "llama_tied": lambda: tiny_llama(tie_word_embeddings=True),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SMALL, num_key_value_heads=2)),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**SMALL, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_positions=128, n_embd=32, n_layer=2, n_head=4, use_cache=False, bos_token_id=1, eos_token_id=2)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=8)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=8)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**SMALL, num_key_value_heads=2)),
    "gpt_oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**SMALL, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)),
}  # fmt: skip
# torch's fused kernel treats a tensor of fewer elements than a vector (four attention sinks here) by another order; its own step shows that the gradients are equal
OWN_STEP = {"gpt_oss": {"host_optimizer": "torch"}}
EMULATED = {"engine": "emulated", "emulated_jitter_seconds": 0.0005}


@pytest.mark.parametrize("offload", [{}, EMULATED, EMULATED | {"recompute": "none"}], ids=["direct", "emulated", "emulated-kept"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32(compare, family, offload):
    torch.manual_seed(0)
    compare(LanguageModel(FAMILIES[family]()), batches(3), offload=offload | OWN_STEP.get(family, {}))


@pytest.mark.parametrize("offload", [{}, EMULATED], ids=["direct", "emulated"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "gpt_oss"])
def test_autocast(compare, family, offload):
    torch.manual_seed(0)
    compare(LanguageModel(FAMILIES[family]()), batches(3), offload=offload | OWN_STEP.get(family, {}), precision="bf16-mixed")


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("step", ["overlap_backward", "after_backward"])
def test_depths_and_step_modes(compare, depth, step):
    compare(LanguageModel(tiny_llama(num_hidden_layers=4)), batches(3), offload=EMULATED | {"prefetch_depth": depth, "optimizer_step": step})


@pytest.mark.parametrize("recompute", ["all", "none", 1, 3])
def test_any_number_of_blocks_may_recompute(compare, recompute):
    compare(LanguageModel(tiny_llama(num_hidden_layers=4)), batches(3), offload=EMULATED | {"recompute": recompute})


@pytest.mark.parametrize("units", [["LlamaMLP", "LlamaAttention"], ["LlamaModel"], ["Linear"]])
def test_any_cut_into_units(compare, units):
    compare(LanguageModel(tiny_llama()), batches(3), offload=EMULATED | {"units": units})
