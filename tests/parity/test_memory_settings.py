"""What saves or uses device memory changes no bit: resident units, host lookups, kept and parked activations; and slices of a batch change rounding only."""

import copy
import gc
import weakref

import pytest
import torch
import transformers as tf
from torch import nn

import lightning_megatrain as mt
from lightning_megatrain.host.machine import DEVICE_BYTES_VARIABLE
from lightning_megatrain.stream.recompute import RecomputePlan
from lightning_megatrain.units import find_units
from tests.conftest import LanguageModel, Squares, batches, loader, stack, tiny_llama, weights

EMULATED = {"engine": "emulated", "emulated_jitter_seconds": 0.0005}
SETTINGS = {
    "resident": {"resident": "1MiB"},
    "resident-some": {"resident": 40_000, "prefetch_depth": 1},
    "embedding-host": {"embedding": "host"},
    "embedding-device": {"embedding": "device"},
    "activations-host": {"activations": "host", "recompute": "all"},
    "recompute-some": {"recompute": 2},
    "all-together": {"resident": 40_000, "embedding": "host", "activations": "host", "recompute": 3, "prefetch_depth": 1},
}


def gpt2():
    """With dropout, and embeddings for positions."""
    torch.manual_seed(0)
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_positions=128, n_embd=32, n_layer=4, n_head=4, use_cache=False, bos_token_id=1, eos_token_id=2))


MODELS = {"llama": lambda: tiny_llama(num_hidden_layers=4), "tied": lambda: tiny_llama(num_hidden_layers=4, tie_word_embeddings=True), "gpt2": gpt2}


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}], ids=["overlap", "clip-accumulate"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_the_bits_are_those_of_plain_lightning(compare, model, setting, options):
    compare(LanguageModel(MODELS[model]()), batches(6), offload=EMULATED | SETTINGS[setting], **options)


@pytest.mark.parametrize("setting", ["resident", "all-together"])
@pytest.mark.parametrize("step", ["overlap_forward", "after_backward"])
def test_with_either_step(compare, setting, step):
    compare(LanguageModel(MODELS["tied"]()), batches(6), offload=EMULATED | SETTINGS[setting] | {"optimizer_step": step})


def test_frozen_units_stay_on_the_device(trainer):
    """With room for the whole model only what is trained crosses again."""
    model = tiny_llama(num_hidden_layers=4)
    for p in model.parameters():
        p.requires_grad_(False)
    for p in model.model.layers[3].parameters():
        p.requires_grad_(True)
    copied = []

    class Watch(LanguageModel):
        def on_train_batch_end(self, *_):
            copied.append(self.trainer.strategy._engine.streamer.copied_bytes)

    module = Watch(copy.deepcopy(model), lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], lr=1e-2, fused=True))
    trainer(max_steps=6, offload=EMULATED | {"resident": "10MiB"}).fit(module, loader(batches(6)))
    block = sum(p.numel() * 4 for p in model.model.layers[3].parameters())
    assert copied[-1] - copied[-2] == pytest.approx(block, rel=0.05)  # padded to cache lines
    plain = LanguageModel(copy.deepcopy(model), module.make)
    trainer(max_steps=6, strategy="auto").fit(plain, loader(batches(6)))
    assert module.losses == plain.losses


# lookups


def test_only_rows_cross_of_a_host_lookup(trainer):
    """The embedding never has a slot, and its gradient comes back as rows."""
    copied = []
    for where in ("host", "device", "auto"):
        run = trainer(max_steps=3, offload=EMULATED | {"embedding": where})
        module = LanguageModel(tiny_llama(vocab_size=4096))
        run.fit(module, loader(batches(3)))
        copied.append(run.strategy._engine.streamer.copied_bytes)
    embedding = 4096 * 32 * 4
    assert copied[1] - copied[0] == 3 * embedding
    assert copied[2] == copied[0], "32 tokens are fewer bytes than 4096 rows"


def test_more_tokens_than_rows_are_looked_up_on_the_device(trainer):
    copied = []
    for where in ("device", "auto"):
        run = trainer(max_steps=2, offload=EMULATED | {"embedding": where})
        run.fit(LanguageModel(tiny_llama()), loader(batches(2, rows=8, tokens=16)))
        copied.append(run.strategy._engine.streamer.copied_bytes)
    assert copied[0] == copied[1]


# recompute=auto


def plan_for(blocks, room):
    plan = RecomputePlan("auto", blocks)
    plan.begin()
    ran = [plan.recomputes(site, 100, "cpu") for site in blocks]
    assert ran == [True] * (len(blocks) - 1) + [False], "one block is measured in the first pass"
    plan.note(blocks[-1], 1000, 100)
    plan.set_room(room, 0.0)
    return plan


def test_auto_keeps_as_many_of_the_last_blocks_as_there_is_room_for():
    _, blocks = find_units(stack(6))
    for room, kept, of_twice in ((0, 0, 0), (1000, 0, 0), (1200, 1, 0), (3400, 3, 1), (6700, 6, 3), (10**9, 6, 6)):  # a tenth of the room is left
        plan = plan_for(blocks, room)
        plan.begin()
        assert [plan.recomputes(site, 100, "cpu") for site in blocks] == [True] * (6 - kept) + [False] * kept
        plan.begin()
        assert sum(not plan.recomputes(site, 200, "cpu") for site in blocks) == of_twice, "twice the tokens, half the blocks"


def test_auto_never_keeps_more_than_there_is_room_for_when_blocks_are_used_twice():
    _, blocks = find_units(stack(4))
    plan = plan_for(blocks, 2300)
    plan.begin()
    assert sum(not plan.recomputes(site, 100, "cpu") for site in [*blocks, *blocks, *blocks]) <= 2


def test_auto_recomputes_everything_under_autocast():
    _, blocks = find_units(stack(3))
    plan = plan_for(blocks, 10**9)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(plan.recomputes(site, 100, "cpu") for site in blocks)


@pytest.mark.parametrize("engine", ["direct", "emulated"])
@pytest.mark.parametrize(("room", "kept"), [(0, 0), (10**9, 4)])
def test_auto_in_a_run(compare, monkeypatch, engine, room, kept):
    monkeypatch.setenv(DEVICE_BYTES_VARIABLE, str(room))
    seen = []

    class Watch(LanguageModel):
        def on_train_batch_end(self, *_):
            engine = getattr(self.trainer.strategy, "_engine", None)
            if engine is not None:
                seen.append(engine.recompute.kept)

    compare(Watch(tiny_llama(num_hidden_layers=4)), batches(4), offload={"engine": engine})
    assert seen == [0, kept, kept, kept]


# activations=host


def live_inputs(trainer, activations, depth=6):
    """How many of the blocks' inputs are still on the device when the forward pass is over."""
    refs, alive = [], []

    class Watch(Squares):
        def training_step(self, batch, batch_idx):
            for block in self.net:
                batch = block(batch)
                refs.append(weakref.ref(batch))
            loss = batch.square().mean()
            del batch
            self.trainer.strategy._engine.engine.to_host.record().wait()
            gc.collect()
            alive.append(sum(ref() is not None for ref in refs))
            refs.clear()
            return loss

    module = Watch(stack(depth))
    run = trainer(max_steps=2, offload=EMULATED | {"activations": activations, "recompute": "all"})
    run.fit(module, loader([torch.randn(4, 16) for _ in range(2)]))
    return alive[-1], run.strategy._engine.parking


def test_parked_inputs_leave_the_device(trainer):
    alive, parking = live_inputs(trainer, "host")
    assert alive <= 2  # the last one is on its way, and its block's output is the loss's
    assert parking.nbytes == 6 * 4 * 16 * 4, "one input a block, in buffers that serve each step again"
    assert live_inputs(trainer, "device")[0] >= 5


def test_a_parked_input_that_is_changed_is_noticed(trainer):
    class Changes(Squares):
        def training_step(self, batch, _):
            x = self.net[0](batch)
            y = self.net[1](x)
            with torch.no_grad():
                x.add_(1.0)
            return (y + x).square().mean()

    with pytest.raises(RuntimeError, match="in-place"):
        trainer(max_steps=1, offload=EMULATED | {"activations": "host", "recompute": "all"}).fit(Changes(stack(2)), loader([torch.randn(4, 16)]))


# rows_per_pass


@pytest.mark.parametrize(
    "offload", [{}, EMULATED, EMULATED | {"activations": "host"}, EMULATED | {"recompute": "none"}], ids=["direct", "emulated", "parked", "kept"]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_slices_of_a_batch_give_the_same_numbers(trainer, offload, rows):
    """In fp64, where rounding can't hide a fault."""
    losses, ends = [], []
    for options in ({"offload": offload | {"rows_per_pass": rows}}, {"strategy": "auto"}):
        module = LanguageModel(tiny_llama().double(), lambda p: torch.optim.SGD(p, lr=0.5))
        trainer(max_steps=3, precision="64-true", **options).fit(module, loader(batches(1, rows=5) * 3))
        losses.append(module.losses)
        ends.append(weights(module))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[1][-1] < losses[1][0]
    for name, value in ends[1].items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-9, atol=1e-12)


def test_slices_cross_the_bus_no_more_often(trainer):
    copied = []
    for rows in ("all", 1):
        run = trainer(max_steps=3, offload=EMULATED | {"rows_per_pass": rows, "recompute": "all"})
        run.fit(LanguageModel(tiny_llama(num_hidden_layers=5)), loader(batches(3, rows=6)))
        copied.append((run.strategy._engine.streamer.copied_bytes, run.strategy._engine.engine.to_host.copied_bytes))
    assert copied[0] == copied[1]


def test_what_is_not_by_rows_is_refused(trainer):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return self.linear(x).sum(0, keepdim=True)

    module = Squares(nn.Sequential(Sums(), Sums()))
    with pytest.raises(ValueError, match="rows_per_pass"):
        trainer(max_steps=1, offload={"rows_per_pass": 2}).fit(module, loader([torch.randn(4, 16)]))


def test_validation_goes_in_slices_too(trainer):
    from tests.conftest import ValidatedModel

    seen = []
    module = ValidatedModel(tiny_llama())
    module.model.model.layers[0].mlp.register_forward_hook(lambda _, args, out: seen.append(out.shape[0]))
    run = trainer(offload={"rows_per_pass": 2})
    ours = run.validate(module, loader(batches(1, rows=5)), verbose=False)[0]["val_loss"]
    assert seen == [2, 2, 1]
    plain = trainer(strategy="auto").validate(module, loader(batches(1, rows=5)), verbose=False)[0]["val_loss"]
    assert ours == pytest.approx(plain, rel=1e-6)


def test_the_policy_is_what_the_strategy_uses():
    strategy = mt.MegaTrainStrategy(offload={"activations": "host", "rows_per_pass": 4, "embedding": "host", "resident": "1GiB"})
    assert strategy.offload.activations == "host"
