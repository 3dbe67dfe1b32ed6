"""overlap_forward: updates that wait for the next forward, bit for bit, whoever reads in between."""

import copy

import lightning as L
import pytest
import torch

from lightning_megatrain.optim import guard
from lightning_megatrain.optim.deferred import DeferredUpdates
from lightning_megatrain.optim.guard import PendingParameter
from lightning_megatrain.optim.worker import StepWorker
from tests.conftest import LanguageModel, Squares, ValidatedModel, batches, loader, stack, tiny_llama, weights

FORWARD = {"optimizer_step": "overlap_forward"}
EMULATED = FORWARD | {"engine": "emulated", "emulated_jitter_seconds": 0.0005}
ENGINES = pytest.mark.parametrize("offload", [FORWARD, EMULATED], ids=["direct", "emulated"])


@ENGINES
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
@pytest.mark.parametrize("tied", [False, True])
def test_the_bits_are_those_of_plain_lightning(compare, offload, options, tied):
    compare(LanguageModel(tiny_llama(num_hidden_layers=4, tie_word_embeddings=tied)), batches(6), offload=offload, **options)


@ENGINES
def test_split_masters_are_those_of_an_update_after_backward(trainer, offload):
    ends = []
    for policy in (offload, {"optimizer_step": "after_backward"}):
        run = trainer(max_steps=5, precision="bf16-true", gradient_clip_val=0.1, offload=policy)
        run.fit(LanguageModel(tiny_llama()), loader(batches(5)))
        ends.append(run.strategy.master_state_dict())
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


@ENGINES
def test_updates_really_wait(trainer, offload):
    """Between the step and the next forward the weights are the old ones: else nothing was deferred."""
    pending = []

    class Watch(Squares):
        def training_step(self, batch, batch_idx):
            engine = self.trainer.strategy._engine
            pending.append(bool(engine.deferred._waiting or engine.deferred._done))
            return super().training_step(batch, batch_idx)

    trainer(max_steps=4, offload=offload).fit(Watch(stack()), loader([torch.randn(4, 16) for _ in range(4)]))
    assert pending == [False, True, True, True]


@ENGINES
def test_validation_checkpoints_and_state_dicts_see_the_new_weights(trainer, tmp_path, offload):
    ends = []
    for options in ({"offload": offload}, {"strategy": "auto"}):
        module = ValidatedModel(tiny_llama())
        saver = L.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path / str(len(ends)), every_n_train_steps=2, save_top_k=-1)
        run = trainer(max_steps=4, val_check_interval=2, callbacks=[saver], enable_checkpointing=True, **options)
        run.fit(module, loader(batches(4)), loader(batches(1)))
        saved = [torch.load(path, weights_only=True)["state_dict"] for path in sorted((tmp_path / str(len(ends))).iterdir())]
        ends.append((float(run.callback_metrics["val_loss"]), saved, weights(module)))
    assert ends[0][0] == ends[1][0]
    assert len(ends[1][1]) == 2
    for ours, plain in zip([*ends[0][1], ends[0][2]], [*ends[1][1], ends[1][2]], strict=True):
        assert all(torch.equal(ours[name], value) for name, value in plain.items())


@ENGINES
def test_a_callback_that_averages_weights_waits_for_their_updates(trainer, offload):
    from torch.optim.swa_utils import get_ema_avg_fn

    ends = []
    for options in ({"offload": offload}, {"strategy": "auto"}):
        module = LanguageModel(tiny_llama())
        averaging = L.pytorch.callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.5))
        trainer(max_epochs=2, callbacks=[averaging], **options).fit(module, loader(batches(3)))
        ends.append(weights(module))
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


@ENGINES
def test_blocks_that_the_next_forward_skips_are_updated_all_the_same(compare, offload):
    class Skips(Squares):
        def training_step(self, batch, batch_idx):
            for i, block in enumerate(self.net):
                batch = batch if (batch_idx + i) % 3 == 0 else block(batch)
            loss = batch.square().mean()
            self.losses.append(float(loss.detach()))
            return loss

    compare(Skips(stack()), [torch.randn(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)], offload=offload)


@ENGINES
def test_an_exception_applies_what_was_stepped(trainer, offload):
    class Fails(Squares):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("stop")
            return super().training_step(batch, batch_idx)

    data = [torch.randn(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    ends = []
    for options in ({"offload": offload}, {"strategy": "auto"}):
        module = copy.deepcopy(Fails(stack()))
        with pytest.raises(RuntimeError, match="stop"):
            trainer(max_steps=3, **options).fit(module, loader(data))
        ends.append(weights(module))
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def _pending(module):
    """Units whose update waits, or may still run."""
    updates = module.trainer.strategy._engine.deferred
    return len(updates._waiting) + len(updates._done)


class Reads(Squares):
    """Reads and writes weights between steps, where nothing but the weight itself can tell."""

    def training_step(self, batch, batch_idx):
        waiting = getattr(self.trainer.strategy, "_engine", None) is not None and _pending(self)
        with torch.no_grad():
            self.losses.append(float(self.net[2][0].weight.norm()))
        if waiting:
            self.waited.append(waiting - _pending(self))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        self.net[1][0].bias.data.clamp_(-0.01, 0.01)
        self.losses.append(sum(float(p.detach().sum()) for p in self.net[3].parameters()))

    def on_train_batch_start(self, *_):
        torch._foreach_mul_([p.detach() for p in self.net[0].parameters()], 0.99)


@ENGINES
def test_who_reads_or_writes_a_weight_waits_for_its_update_and_for_no_other(compare, offload):
    module = Reads(stack(8))
    Reads.waited = []
    compare(module, [torch.randn(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)], offload=offload)
    assert module.waited == [1] * 5
    del Reads.waited


@ENGINES
def test_parameters_are_ordinary_again_after_the_run(trainer, offload):
    module = Squares(stack())
    kinds = set()

    class Watch(L.Callback):
        def on_train_batch_end(self, *_):
            kinds.update(type(p) for p in module.parameters())
            assert all(isinstance(p, torch.nn.Parameter) and p.shape for p in module.parameters())

    trainer(max_steps=3, offload=offload, callbacks=[Watch()]).fit(module, loader([torch.randn(4, 16)] * 3))
    assert kinds == {PendingParameter}
    assert {type(p) for p in module.parameters()} == {torch.nn.Parameter}
    assert not guard._waiting


@pytest.mark.parametrize(("engine", "options", "line"), [
    ("emulated", {"gradient_clip_val": 0.1}, "updates overlap the next forward: gradient clipping needs all gradients"),
    ("emulated", {"accumulate_grad_batches": 2}, "updates overlap the next forward: gradients are accumulated over 2 batches"),
    ("emulated", {}, "updates overlap backward"),
    ("direct", {"gradient_clip_val": 0.1}, "updates after backward: gradient clipping needs all gradients"),
])  # fmt: skip
def test_auto_chooses_and_says_why(trainer, caplog, engine, options, line):
    with caplog.at_level("INFO"):
        trainer(max_steps=2, offload={"engine": engine}, **options).fit(LanguageModel(tiny_llama()), loader(batches(2)))
    assert [record.message for record in caplog.records if "megatrain: updates" in record.message] == [f"megatrain: {line}"]


@pytest.mark.parametrize("with_worker", [False, True])
def test_each_update_runs_once_in_the_order_it_is_needed(with_worker):
    worker = StepWorker() if with_worker else None
    updates, ran = DeferredUpdates(worker), []
    for unit in (2, 0, 1):
        updates.put(unit, lambda unit=unit: ran.append(unit))
    updates.start([0, 1, 2])
    for unit in (0, 1, 2, 0):
        updates.ensure(unit)
        assert updates.ready(unit)
    updates.flush()
    assert ran == [0, 1, 2]
    assert not updates.pending
    if worker is not None:
        worker.close()


def test_an_update_that_fails_in_the_worker_is_raised_where_it_is_waited_for():
    worker = StepWorker()
    updates = DeferredUpdates(worker)

    def fail():
        raise FloatingPointError("no")

    updates.put(0, fail)
    updates.start([0])
    with pytest.raises(RuntimeError, match="FloatingPointError: no"):
        updates.ensure(0)
    worker.close()
