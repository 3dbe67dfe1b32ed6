import dataclasses

import pytest
import torch

from lightning_megatrain.host.master import combine, split_
from lightning_megatrain.optim.kernel import AdamScalars, AdamSegment, HostKernel, SgdScalars, SgdSegment, find_library

COUNT = 64 * 500
compiled = pytest.mark.skipif(find_library() is None, reason="no compiled kernel: no C++ compiler was found at installation")


def gradients(steps=7):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.randn(COUNT, generator=generator) * 10.0 ** torch.randint(-6, 3, (COUNT,), generator=generator)


def scalars(step, decoupled=True, weight_decay=0.1, beta1=0.9):
    return AdamScalars(lr=1e-2, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=weight_decay, decoupled=decoupled, step=step)


def oracle(decoupled, weight_decay, beta1):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(COUNT))
    start = p.detach().clone()
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = make([p], lr=1e-2, weight_decay=weight_decay, betas=(beta1, 0.999), fused=True)
    for gradient in gradients():
        p.grad = gradient
        optimizer.step()
    return start, p.detach(), optimizer.state[p]


@pytest.mark.parametrize("library", [pytest.param(None, marks=compiled, id="compiled"), pytest.param("", id="torch")])
@pytest.mark.parametrize(("decoupled", "weight_decay", "beta1"), [(True, 0.1, 0.9), (True, 0.0, 0.9), (False, 0.0, 0.9), (False, 0.1, 0.9), (True, 0.1, 0.3)])
def test_fp32_equals_torchs_fused_step_to_the_bit(library, decoupled, weight_decay, beta1):
    weight, expected, state = oracle(decoupled, weight_decay, beta1)
    exp_avg, exp_avg_sq = torch.zeros(COUNT), torch.zeros(COUNT)
    with HostKernel(library=library) as kernel:
        for step, gradient in enumerate(gradients(), 1):
            kernel.step([AdamSegment(weight, None, gradient, exp_avg, exp_avg_sq, scalars(step, decoupled, weight_decay, beta1))])
    assert torch.equal(weight, expected)
    assert torch.equal(exp_avg, state["exp_avg"])
    assert torch.equal(exp_avg_sq, state["exp_avg_sq"])


@pytest.mark.parametrize("library", [pytest.param(None, marks=compiled, id="compiled"), pytest.param("", id="torch")])
def test_a_split_master_takes_the_fp32_steps_of_a_bf16_gradient(library):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(COUNT))
    high, trail = torch.empty(COUNT, dtype=torch.bfloat16), torch.empty(COUNT, dtype=torch.int16)
    split_(p.detach(), high, trail)
    optimizer = torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1, fused=True)
    exp_avg, exp_avg_sq = torch.zeros(COUNT), torch.zeros(COUNT)
    with HostKernel(library=library) as kernel:
        for step, gradient in enumerate(gradients(), 1):
            p.grad = gradient.bfloat16().float()
            optimizer.step()
            kernel.step([AdamSegment(high, trail, gradient.bfloat16(), exp_avg, exp_avg_sq, scalars(step))])
    assert torch.equal(combine(high, trail), p.detach())


@compiled
def test_the_bits_do_not_depend_on_the_vector_width_the_threads_or_the_cut():
    ends = []
    for width, threads, cuts in ((0, 1, [COUNT]), (1, 2, [COUNT]), (2, 3, [100, 77, COUNT - 177])):
        with HostKernel(threads) as kernel:
            if width > kernel.width:
                pytest.skip(f"this machine has no vectors of width {width}")
            torch.manual_seed(0)
            weight, exp_avg, exp_avg_sq = torch.randn(COUNT), torch.zeros(COUNT), torch.zeros(COUNT)
            for step, gradient in enumerate(gradients(3), 1):
                parts = zip(*(t.split(cuts) for t in (weight, gradient, exp_avg, exp_avg_sq)), strict=True)
                kernel.step([AdamSegment(w, None, g, m, v, scalars(step)) for w, g, m, v in parts], width=width)
            ends.append(weight)
    assert all(torch.equal(end, ends[0]) for end in ends)


@compiled
@pytest.mark.parametrize("master", ["fp32", "split", "none"])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments_dtype", [torch.float32, torch.bfloat16])
def test_every_variant_equals_the_fallback(master, gradient_dtype, moments_dtype):
    ends = []
    for library in (None, ""):
        torch.manual_seed(0)
        value = torch.randn(COUNT)
        trail = torch.empty(COUNT, dtype=torch.int16) if master == "split" else None
        weight = value.clone() if master == "fp32" else value.bfloat16()
        if trail is not None:
            split_(value, weight, trail)
        exp_avg, exp_avg_sq = (torch.zeros(COUNT, dtype=moments_dtype) for _ in range(2))
        with HostKernel(library=library) as kernel:
            for step, gradient in enumerate(gradients(3), 1):
                kernel.step([AdamSegment(weight, trail, gradient.to(gradient_dtype), exp_avg, exp_avg_sq, scalars(step))])
        ends.append([weight, exp_avg, exp_avg_sq] + ([trail] if trail is not None else []))
    for ours, torchs in zip(*ends, strict=True):
        assert torch.equal(ours, torchs)


@compiled
def test_nan_and_infinity_come_through():
    weight = torch.tensor([1.0, float("nan"), 1.0, float("inf")] * 16)
    high, trail = torch.empty(64, dtype=torch.bfloat16), torch.empty(64, dtype=torch.int16)
    split_(weight, high, trail)
    gradient = torch.tensor([0.0, 1.0, float("nan"), 1.0] * 16)
    with HostKernel() as kernel:
        kernel.step([AdamSegment(high, trail, gradient, torch.zeros(64), torch.zeros(64), scalars(1, weight_decay=0.0))])
    end = combine(high, trail)
    assert end[0] == 1.0
    assert end[1].isnan()
    assert end[2].isnan()
    assert end[3].isinf()


@compiled
def test_a_width_that_the_machine_lacks_is_refused():
    with HostKernel() as kernel, pytest.raises(ValueError, match="width 9"):
        kernel.step([AdamSegment(*(torch.zeros(64) if i != 1 else None for i in range(5)), scalars(1))], width=9)


RULES = {
    "plain": {}, "decay": {"weight_decay": 0.1}, "momentum": {"momentum": 0.9, "weight_decay": 0.1}, "dampening": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}  # fmt: skip


def sgd_scalars(options, first, clip=1.0):
    return SgdScalars(lr=1e-2, **({"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False} | options), first=first, clip=clip)


@pytest.mark.parametrize("library", [pytest.param(None, marks=compiled, id="compiled"), pytest.param("", id="torch")])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("master", ["fp32", "split"])
def test_sgd_equals_torchs_step_to_the_bit(library, rule, master):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(COUNT))
    weight, trail = p.detach().clone(), None
    if master == "split":
        weight, trail = torch.empty(COUNT, dtype=torch.bfloat16), torch.empty(COUNT, dtype=torch.int16)
        split_(p.detach(), weight, trail)
    optimizer = torch.optim.SGD([p], lr=1e-2, **RULES[rule])
    momentum = torch.full((COUNT,), float("nan")) if "momentum" in RULES[rule] else None
    with HostKernel(library=library) as kernel:
        for step, gradient in enumerate(gradients()):
            p.grad = gradient.clone()
            optimizer.step()
            kernel.step([SgdSegment(weight, trail, gradient, momentum, sgd_scalars(RULES[rule], step == 0))])
    assert torch.equal(weight if trail is None else combine(weight, trail), p.detach())
    if momentum is not None:
        assert torch.equal(momentum, optimizer.state[p]["momentum_buffer"])


@pytest.mark.parametrize("library", [pytest.param(None, marks=compiled, id="compiled"), pytest.param("", id="torch")])
@pytest.mark.parametrize("rule", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_clip_factor_is_a_multiplication_of_the_gradient_in_its_own_dtype(library, rule, dtype):
    ends = []
    for clip in (0.3, 1.0):
        torch.manual_seed(0)
        weight, planes = torch.randn(COUNT), [torch.zeros(COUNT) for _ in range(2)]
        with HostKernel(library=library) as kernel:
            for step, gradient in enumerate(gradients(3)):
                gradient = gradient.to(dtype) if clip != 1.0 else gradient.to(dtype).mul_(0.3)
                if rule == "adam":
                    kernel.step([AdamSegment(weight, None, gradient, *planes, dataclasses.replace(scalars(step + 1), clip=clip))])
                else:
                    kernel.step([SgdSegment(weight, None, gradient, planes[0], sgd_scalars(RULES["momentum"], step == 0, clip))])
        ends.append(weight)
    assert torch.equal(*ends)


@compiled
@pytest.mark.parametrize("master", ["fp32", "split", "none"])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16])
def test_every_variant_of_sgd_equals_the_fallback(master, gradient_dtype, momentum_dtype):
    ends = []
    for library, width in ((None, None), (None, 0), ("", None)):
        torch.manual_seed(0)
        value = torch.randn(COUNT)
        trail = torch.empty(COUNT, dtype=torch.int16) if master == "split" else None
        weight = value.clone() if master == "fp32" else value.bfloat16()
        if trail is not None:
            split_(value, weight, trail)
        momentum = torch.zeros(COUNT, dtype=momentum_dtype)
        with HostKernel(library=library) as kernel:
            for step, gradient in enumerate(gradients(3)):
                kernel.step([SgdSegment(weight, trail, gradient.to(gradient_dtype), momentum, sgd_scalars(RULES["nesterov"], step == 0, 0.7))], width)
        ends.append([weight, momentum] + ([trail] if trail is not None else []))
    for end in ends[:2]:
        assert all(torch.equal(ours, torchs) for ours, torchs in zip(end, ends[2], strict=True))
