"""What a Lightning user sees around the numbers: lifecycle, exceptions, refusals, reports."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import lightning_megatrain as mt
from tests.conftest import LanguageModel, Squares, ValidatedModel, batches, loader, stack, tiny_llama, weights

EMULATED = {"engine": "emulated"}
ENGINES = pytest.mark.parametrize("offload", [{}, EMULATED], ids=["direct", "emulated"])


def data(count=4):
    return [torch.randn(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(count)]


@ENGINES
def test_the_module_is_an_ordinary_one_afterwards(trainer, offload):
    module = LanguageModel(tiny_llama())
    ids = {name: id(p) for name, p in module.named_parameters()}
    threads = threading.active_count()
    trainer(max_steps=2, offload=offload).fit(module, loader(batches(2)))
    assert {name: id(p) for name, p in module.named_parameters()} == ids
    assert threading.active_count() == threads
    assert not any("forward" in m.__dict__ for m in module.modules())
    expected = module.model(input_ids=batches(1)[0]).logits
    for twin in (copy.deepcopy(module.model), pickle.loads(pickle.dumps(module.model))):
        assert torch.equal(twin(input_ids=batches(1)[0]).logits, expected)


@ENGINES
def test_a_copy_made_during_a_run_is_an_ordinary_module(trainer, offload):
    module, twins = LanguageModel(tiny_llama()), []

    def take(*_):
        twins.extend([copy.deepcopy(module.model), pickle.loads(pickle.dumps(module.model))])

    module.on_train_batch_start = take
    trainer(max_steps=1, offload=offload).fit(module, loader(batches(1)))
    start = tiny_llama()
    for twin in twins:
        out = twin(input_ids=batches(1)[0]).logits
        assert torch.equal(out, start(input_ids=batches(1)[0]).logits)
        out.sum().backward()


@ENGINES
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_an_exception_anywhere_gives_the_module_back(trainer, offload, where):
    class Boom(Exception):
        pass

    def fail(*_):
        raise Boom("here")

    module = LanguageModel(tiny_llama())
    handle = None
    if where == "forward":
        handle = module.model.model.layers[1].mlp.register_forward_pre_hook(fail)
    elif where == "backward":
        handle = module.model.model.layers[0].mlp.up_proj.weight.register_hook(fail)
    else:
        module.on_before_optimizer_step = fail
    threads = threading.active_count()
    run = trainer(max_steps=2, offload=offload)
    with pytest.raises(Boom):
        run.fit(module, loader(batches(2)))
    assert threading.active_count() == threads
    assert "step" not in run.optimizers[0].__dict__
    if handle is not None:
        handle.remove()
    again = LanguageModel(module.model)
    trainer(max_steps=1, offload=offload).fit(again, loader(batches(1)))
    assert again.losses


def test_an_error_on_the_bus_reaches_the_user(trainer, monkeypatch):
    from lightning_megatrain.stream.engines import ThreadStream

    copies = []
    real = ThreadStream._copy

    def copy_(self, target, source):
        copies.append(1)
        if len(copies) == 9:
            raise OSError("the bus is gone")
        real(self, target, source)

    monkeypatch.setattr(ThreadStream, "_copy", copy_)
    with pytest.raises(RuntimeError, match="the bus is gone"):
        trainer(max_steps=3, offload=EMULATED).fit(LanguageModel(tiny_llama()), loader(batches(3)))


def test_an_error_in_the_step_worker_reaches_the_user(trainer, monkeypatch):
    from lightning_megatrain.optim.kernel import HostKernel

    def fail(self, segments, width=None):
        raise FloatingPointError("the kernel is gone")

    monkeypatch.setattr(HostKernel, "step", fail)
    with pytest.raises(RuntimeError, match="the kernel is gone"):
        trainer(max_steps=3, offload=EMULATED).fit(LanguageModel(tiny_llama()), loader(batches(3)))


@ENGINES
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_validate_fit_test_and_fit_again(trainer, offload, precision):
    module = ValidatedModel(tiny_llama())
    module.test_step = module.validation_step
    run = trainer(max_epochs=2, precision=precision, offload=offload)
    before = run.validate(module, loader(batches(2)), verbose=False)[0]["val_loss"]
    run.fit(module, loader(batches(4)), loader(batches(2)))
    after = run.test(module, loader(batches(2)), verbose=False)[0]["val_loss"]
    assert after < before


@pytest.mark.parametrize(("precision", "step", "promised"), [
    ("32-true", "after_backward", 16), ("32-true", "overlap_backward", 12), ("bf16-true", "after_backward", 14), ("bf16-true", "overlap_backward", 12),
])  # fmt: skip
@ENGINES
def test_bytes_a_parameter(trainer, precision, step, promised, offload):
    run = trainer(max_steps=2, precision=precision, offload=offload | {"optimizer_step": step})
    run.fit(Squares(stack(4, 256)), loader([torch.randn(2, 256)] * 2))
    report = run.strategy.memory_report()
    assert report.bytes_per_parameter == pytest.approx(promised, rel=0.03)
    assert run.strategy.plan(stack(4, 256), precision).bytes_per_parameter == pytest.approx(promised, rel=0.03)
    assert "bytes a parameter" in str(report)


def test_the_exact_master_of_a_weight_of_one(trainer):
    """400 steps of lr 1e-5 with gradient 1: 0.9959946, worked out by hand in fp32; bf16 alone stays at 1.0."""

    class One(Squares):
        def training_step(self, batch, _):
            return self.net(torch.ones(1, 32, dtype=torch.bfloat16)).sum()

    net = nn.Linear(32, 1, bias=False)
    nn.init.ones_(net.weight)
    run = trainer(max_steps=400, precision="bf16-true")
    run.fit(One(net, lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0)), loader([torch.zeros(1)] * 400))
    torch.testing.assert_close(run.strategy.master_state_dict()["net.weight"], torch.full((1, 32), 0.9959946), rtol=0, atol=2e-7)


def test_a_full_checkpoint_of_a_bf16_run_holds_the_exact_masters(trainer, tmp_path):
    module = LanguageModel(tiny_llama())
    run = trainer(max_steps=3, precision="bf16-true")
    run.fit(module, loader(batches(3)))
    run.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    for name, master in run.strategy.master_state_dict().items():
        assert saved[name].dtype == torch.float32
        assert torch.equal(saved[name], master)


def test_state_interchanges_with_torchs_optimizer(trainer):
    module = LanguageModel(tiny_llama())
    run = trainer(max_steps=3)
    run.fit(module, loader(batches(3)))
    plain = torch.optim.AdamW(module.parameters(), lr=1e-2)
    plain.load_state_dict(run.optimizers[0].state_dict())
    plain.step()
    assert {key for state in plain.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("options", "reason"), [
    ({"gradient_clip_val": 1.0}, "clipping"), ({"accumulate_grad_batches": 2}, "accumulated over 2"),
])  # fmt: skip
def test_an_overlap_that_cannot_be_is_refused_with_the_reason(trainer, options, reason):
    with pytest.raises(ValueError, match=rf"overlap_backward.*{reason}.*after_backward"):
        trainer(max_steps=1, offload={"optimizer_step": "overlap_backward"}, **options).fit(LanguageModel(tiny_llama()), loader(batches(1)))


def test_a_hook_that_is_set_during_the_run_ends_the_overlap(trainer):
    module, seen = Squares(stack()), []

    def look(_):
        seen.append(all(p.grad is not None for p in module.parameters()))

    def start(batch, batch_idx):
        if batch_idx == 2:
            module.on_before_optimizer_step = look

    module.on_train_batch_start = start
    trainer(max_steps=4).fit(module, loader(data()))
    assert seen == [True, True]


def test_several_devices_are_refused():
    strategy = mt.MegaTrainStrategy()
    with pytest.raises(ValueError, match="devices=1"):
        strategy.parallel_devices = [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_replaced_parameters_are_named(trainer):
    module = LanguageModel(tiny_llama())
    module.on_train_start = lambda: module.model.resize_token_embeddings(80, mean_resizing=False)
    with pytest.raises(RuntimeError, match="embed_tokens"):
        trainer(max_steps=1).fit(module, loader(batches(1)))


def test_settings_of_later_versions_say_so():
    with pytest.raises(ValueError, match="not in this version"):
        mt.MegaTrainStrategy(offload={"storage": "somewhere"})


def test_lbfgs_on_split_masters_is_refused_and_in_fp32_is_torchs(trainer, compare):
    def make(p):
        return torch.optim.LBFGS(p, lr=0.1, max_iter=3)

    with pytest.raises(ValueError, match="LBFGS"):
        trainer(max_steps=1, precision="bf16-true").fit(Squares(stack(), make), loader(data(1)))
    compare(Squares(stack(), make), data(3))


def test_the_users_switches_are_put_back(trainer):
    module = LanguageModel(tiny_llama())
    module.model.config.use_cache = True
    layers = list(module.model.model.layers)
    for layer in layers:
        layer.gradient_checkpointing = True
    trainer(max_steps=1).fit(module, loader(batches(1)))
    assert module.model.config.use_cache is True
    assert all(m.gradient_checkpointing is True for m in layers)


def test_the_twin_package(tmp_path):
    pl = pytest.importorskip("pytorch_lightning")

    class Twin(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = stack()

        def training_step(self, batch, _):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    ends = []
    for name in ("megatrain", "auto"):
        module = Twin()
        pl.Trainer(strategy=name, accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                   enable_model_summary=False, default_root_dir=tmp_path).fit(module, loader(data(3)))  # fmt: skip
        ends.append(weights(module))
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def test_without_a_compiled_kernel_it_steps_in_torch_to_the_same_bits_and_says_so(trainer, monkeypatch, caplog):
    from lightning_megatrain.optim import kernel

    ends = []
    for found in (kernel.find_library(), None):
        monkeypatch.setattr(kernel, "find_library", lambda found=found: found)
        module = LanguageModel(tiny_llama())
        trainer(max_steps=3).fit(module, loader(batches(3)))
        ends.append(weights(module))
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())
    assert "install a C++ compiler" in caplog.text
