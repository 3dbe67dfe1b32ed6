"""torch.compile of blocks, asked for by the policy or by the user's own compilation."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from lightning_megatrain.stream import compiled
from tests.conftest import LanguageModel, batches, loader, tiny_llama


@pytest.fixture
def graphs(monkeypatch):
    """Number of graphs that dynamo captured in this test; they run as the same operations, so that bits can be compared."""
    torch._dynamo.reset()
    counters.clear()
    compiled._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield lambda: counters["stats"]["unique_graphs"]
    compiled._compiled.cache_clear()


def by_blocks(module):
    for layer in module.model.model.layers:
        layer.compile(backend="aot_eager")


def by_wrapping(module):
    layers = module.model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer)


ASKED = {"policy": lambda module: None, "block.compile()": by_blocks, "torch.compile(block)": by_wrapping}


@pytest.mark.parametrize("offload", [
    {"recompute": "all"}, {"recompute": "none"}, {"engine": "emulated", "recompute": "all"},
    {"engine": "emulated", "recompute": "none", "optimizer_step": "overlap_forward", "activations": "host"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("asked", ASKED)
def test_one_graph_for_all_blocks_and_the_bits_of_plain_torch(trainer, graphs, offload, asked):
    module, plain = LanguageModel(tiny_llama(num_hidden_layers=6)), LanguageModel(tiny_llama(num_hidden_layers=6))
    ASKED[asked](module)
    trainer(max_steps=4, offload=offload | {"compile": asked == "policy"}).fit(module, loader(batches(4)))
    assert graphs() == 1
    trainer(max_steps=4, strategy="auto").fit(plain, loader(batches(4)))
    assert module.losses == plain.losses


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the user's own compilation looks at the embeddings
@pytest.mark.parametrize("engine", ["direct", "emulated"])
def test_a_compiled_model_keeps_its_blocks_apart(trainer, graphs, engine):
    module, plain = LanguageModel(tiny_llama(num_hidden_layers=6)), LanguageModel(tiny_llama(num_hidden_layers=6))
    module.model = torch.compile(module.model)
    trainer(max_steps=4, offload={"engine": engine}).fit(module, loader(batches(4)))
    assert 1 < graphs() < 9  # between the blocks, too, but not one a block of these six
    trainer(max_steps=4, strategy="auto").fit(plain, loader(batches(4)))
    assert module.losses == pytest.approx(plain.losses, rel=1e-5)


def test_the_users_own_compilation_is_back_after_the_run(trainer, graphs):
    module = LanguageModel(tiny_llama())
    by_blocks(module)
    before = [layer._compiled_call_impl for layer in module.model.model.layers]
    trainer(max_steps=1).fit(module, loader(batches(1)))
    assert [layer._compiled_call_impl for layer in module.model.model.layers] == before
    assert all(before)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_the_default_backend_trains_like_plain_torch(trainer):
    """One run through inductor: it fuses and rounds differently."""
    module, plain = LanguageModel(tiny_llama()), LanguageModel(tiny_llama())
    trainer(max_steps=3, offload={"engine": "emulated", "compile": True, "recompute": "all"}).fit(module, loader(batches(3)))
    trainer(max_steps=3, strategy="auto").fit(plain, loader(batches(3)))
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
