"""bf16-true with the split master against an fp32 loop; plain bf16 against none."""

import copy

import pytest
import torch

from tests.conftest import LanguageModel, Squares, ValidatedModel, batches, loader, tiny_llama


def nearest_bf16(x):
    return ((x.contiguous().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def fp32_loop(start, data, make):
    """Weights rounded to bf16 before each forward, an fp32 copy that is stepped."""
    masters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in start.named_parameters()}
    optimizer = make(masters.values())
    model = copy.deepcopy(start)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    model = model.bfloat16()
    for name, b in model.named_buffers():
        b.data = buffers[name]
    for batch in data:
        for name, p in model.named_parameters():
            p.data, p.grad = nearest_bf16(masters[name].detach()), None
        torch.set_default_dtype(torch.bfloat16)
        loss = model(input_ids=batch, labels=batch).loss
        torch.set_default_dtype(torch.float32)
        loss.backward()
        for name, p in model.named_parameters():
            masters[name].grad = p.grad.float()
        optimizer.step()
    return {f"model.{name}": m.detach() for name, m in masters.items()}


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.parametrize("engine", ["direct", "emulated"])
@pytest.mark.parametrize("step", ["after_backward", "overlap_backward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_split_master_is_an_fp32_run(trainer, name, step, engine):
    start, data = tiny_llama(), batches(4)
    module = LanguageModel(copy.deepcopy(start), OPTIMIZERS[name])
    run = trainer(max_steps=4, precision="bf16-true", offload={"optimizer_step": step, "engine": engine})
    run.fit(module, loader(data))
    ours, expected = run.strategy.master_state_dict(), fp32_loop(start, data, OPTIMIZERS[name])
    for key, value in expected.items():
        assert torch.equal(ours[key], value), key
        assert torch.equal(dict(module.named_parameters())[key], nearest_bf16(value)), key


def test_plain_bf16_keeps_no_trail(trainer):
    module = LanguageModel(tiny_llama())
    run = trainer(max_steps=3, precision="bf16-true", offload={"master": "none", "moments": "bf16"})
    run.fit(module, loader(batches(3)))
    report = run.strategy.memory_report()
    assert report.trail_bytes == 0
    assert report.bytes_per_parameter == pytest.approx(6, rel=0.1)  # weight and two moments of two bytes, no stored gradient
    assert module.losses[-1] < module.losses[0]


def test_a_second_fit_of_the_same_trainer_goes_on_from_the_exact_masters(trainer):
    data = batches(6)
    one = trainer(max_steps=3, precision="bf16-true")
    module = ValidatedModel(tiny_llama(), OPTIMIZERS["sgd"])
    one.fit(module, loader(data[:3]), loader(data[:1]))
    before = one.strategy.master_state_dict()
    one.fit_loop.epoch_loop.max_steps = 3
    one.validate(module, loader(data[:1]), verbose=False)
    assert all(torch.equal(before[name], value) for name, value in one.strategy.master_state_dict().items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())


def test_buffers_keep_their_dtype(trainer):
    module = LanguageModel(tiny_llama())
    trainer(max_steps=1, precision="bf16-true").fit(module, loader(batches(1)))
    assert module.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert module.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:You passed .*16-mixed")  # Lightning turns it into bf16-mixed on a CPU
@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
def test_fp16_is_refused_with_what_to_use_instead(trainer, precision):
    with pytest.raises(ValueError, match="bf16-true"):
        trainer(precision=precision)


def test_a_batch_norm_stays_in_fp32_with_its_statistics(trainer):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 16))
    module = Squares(net)
    trainer(max_steps=4, precision="bf16-true").fit(module, loader([torch.randn(8, 16).bfloat16()] * 4))
    assert net[1].weight.dtype == net[1].running_mean.dtype == torch.float32
    assert net[0].weight.dtype == torch.bfloat16
    assert net[1].running_mean.abs().max() > 0
    assert module.losses[-1] < module.losses[0]
