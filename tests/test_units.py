import pytest
import torch
from torch import nn

from lightning_megatrain.units import find_units
from tests.conftest import stack, tiny_llama


def names(module, classes="auto"):
    units, _sites = find_units(module, classes)
    found = [id(p) for unit in units for p in unit.parameters]
    assert len(found) == len(set(found))
    assert set(found) == {id(p) for p in module.parameters()}, "every parameter is in exactly one unit"
    return [(unit.name, unit.streamed) for unit in units]


def test_a_llama_is_embedding_blocks_head_and_a_left_over_norm():
    assert names(tiny_llama()) == [
        ("model.embed_tokens", True), ("model.layers.0", True), ("model.layers.1", True), ("lm_head", True), ("leftovers", False),
    ]  # fmt: skip


def test_a_tied_weight_is_one_unit_that_both_uses_need():
    units, sites = find_units(tiny_llama(tie_word_embeddings=True))
    tied = next(unit for unit in units if unit.name == "model.embed_tokens.weight")
    assert [site.name for site in sites if tied.index in site.units] == ["model.embed_tokens", "lm_head"]


def test_repeated_children_of_a_container():
    assert names(stack(3)) == [("0", True), ("1", True), ("2", True)]


def test_lists_of_lists_are_looked_into():
    module = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
    assert [name for name, _ in names(module)] == ["0.0", "0.1", "1.0", "1.1"]


def test_what_the_model_declares_wins_over_the_container():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

    class Model(nn.Module):
        _no_split_modules = ("Block",)

        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(Stage() for _ in range(2))

    assert [name for name, _ in names(Model())] == ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"]


def test_classes_by_name():
    assert [name for name, _ in names(tiny_llama(), ["LlamaMLP"])][1] == "model.layers.0.self_attn.q_proj"
    assert ("model.layers.0.mlp", True) in names(tiny_llama(), ["LlamaMLP"])


def test_a_name_that_matches_nothing_is_answered_with_those_that_would():
    with pytest.raises(ValueError, match=r"NoSuchBlock.*LlamaDecoderLayer"):
        find_units(tiny_llama(), ["NoSuchBlock"])


def test_it_works_on_the_meta_device():
    with torch.device("meta"):
        module = stack(2)
    assert len(find_units(module)[0]) == 2
