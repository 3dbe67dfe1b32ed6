import pytest
import torch
from torch import nn

import lightning_megatrain as mt
from lightning_megatrain.planning.preflight import check_host_memory
from tests.conftest import LanguageModel, batches, loader, stack, tiny_llama


@pytest.fixture
def llama70b():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256)
        )


@pytest.mark.parametrize(("precision", "overlap", "offload", "promised"), [
    ("32-true", False, {}, 16), ("32-true", True, {}, 12), ("bf16-true", False, {}, 14), ("bf16-true", True, {}, 12), ("bf16-mixed", False, {}, 16),
    ("bf16-true", False, {"master": "none"}, 12), ("bf16-true", True, {"master": "none"}, 10), ("bf16-true", True, {"master": "none", "moments": "bf16"}, 6),
])  # fmt: skip
def test_the_table_of_bytes_for_70b(llama70b, precision, overlap, offload, promised):
    plan = mt.plan(llama70b, precision, offload=offload, overlap=overlap)
    assert plan.parameters == 70_553_706_496
    assert plan.bytes_per_parameter == pytest.approx(promised, rel=0.001)


def test_device_memory_of_70b_is_a_few_units(llama70b):
    """Embedding and head have 128256 * 8192 = 1,050,673,152 parameters each; a block of 855,654,400 shares their size class: four slots of 2.1 GB."""
    plan = mt.plan(llama70b, "bf16-true")
    assert plan.device_slots_bytes == 4 * 2 * 1_050_673_152
    assert plan.units == 82


def test_frozen_parameters_cost_their_weights_only():
    module = stack(4, 64).requires_grad_(False)
    assert mt.plan(module, "32-true", overlap=False).bytes_per_parameter == pytest.approx(4, rel=0.01)


def test_a_plan_that_does_not_fit_is_refused_with_need_have_and_what_would(monkeypatch):
    module = stack(8, 256)
    monkeypatch.setenv("LIGHTNING_MEGATRAIN_HOST_BYTES", str(7 * 2**20))
    plan = mt.plan(module, "32-true", overlap=False)  # 526,336 parameters of 16 bytes: 8.0 MiB
    with pytest.raises(
        MemoryError,
        match=r"needs 8\.0 MiB.*allows 7\.0 MiB.*fits with trainer\.precision=bf16-true \(7\.0 MiB\)|needs 8\.0 MiB.*allows 7\.0 MiB.*offload\.moments=bf16",
    ):
        check_host_memory(module, plan, "adamw")


def test_a_fit_that_does_not_fit_touches_nothing(trainer, monkeypatch):
    module = LanguageModel(tiny_llama())
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    monkeypatch.setenv("LIGHTNING_MEGATRAIN_HOST_BYTES", "100000")
    with pytest.raises(MemoryError, match=r"97\.7 KiB"):
        trainer(max_steps=1).fit(module, loader(batches(1)))
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == before
    assert module.losses == []


def test_a_wrong_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("LIGHTNING_MEGATRAIN_HOST_BYTES", "8GiB")
    with pytest.raises(ValueError, match=r"LIGHTNING_MEGATRAIN_HOST_BYTES.*8GiB.*whole number"):
        check_host_memory(stack(), mt.plan(stack()), "adamw")


@pytest.mark.parametrize(("options", "expected"), [({"precision": "fp8"}, "bf16-true"), ({"optimizer": "lion"}, "adamw")])
def test_an_unknown_word_is_answered_with_the_known_ones(options, expected):
    with pytest.raises(ValueError, match=expected):
        mt.plan(nn.Linear(2, 2), **options)


def test_memory_of_an_earlier_fit_counts_as_available(monkeypatch):
    from lightning_megatrain.planning import preflight

    module = stack(8, 256)
    plan = mt.plan(module, "32-true", overlap=False)
    monkeypatch.setattr(preflight, "available_host_bytes", lambda: 4 * 2**20)
    with pytest.raises(MemoryError, match=r"needs 8\.0 MiB.*this machine has 6\.0 MiB"):  # 4 free, and 2 that the module holds
        check_host_memory(module, plan, "adamw")
    check_host_memory(module, plan, "adamw", held_bytes=5 * 2**20)
