import pytest
import torch
from torch.nn import functional as F

from lightning_megatrain.models import loss
from lightning_megatrain.models.loss import CrossEntropyHead, linear_cross_entropy


def case(dtype, bias):
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 16, dtype=dtype, requires_grad=True), torch.randn(300, 16, dtype=dtype, requires_grad=True)
    offset = torch.randn(300, dtype=dtype, requires_grad=True) if bias else None
    labels = torch.randint(0, 300, (50,))
    labels[::7] = -100
    return hidden, weight, offset, labels


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 50])
def test_any_chunk_gives_the_loss_and_gradients_of_full_logits(monkeypatch, rows, bias):
    monkeypatch.setattr(loss, "_CHUNK_BYTES", rows * 300 * 4)
    hidden, weight, offset, labels = case(torch.float32, bias)
    total = linear_cross_entropy(hidden, weight, offset, labels)
    (total * 0.25).backward()
    ours = [t.grad.clone() for t in (hidden, weight, offset) if t is not None]
    for t in (hidden, weight, offset):
        if t is not None:
            t.grad = None
    expected = F.cross_entropy(F.linear(hidden, weight, offset), labels, reduction="sum")
    (expected * 0.25).backward()
    torch.testing.assert_close(total, expected)
    for gradient, t in zip(ours, [t for t in (hidden, weight, offset) if t is not None], strict=True):
        torch.testing.assert_close(gradient, t.grad)


def test_bf16_weights_give_an_fp32_loss():
    hidden, weight, _, labels = case(torch.bfloat16, False)
    total = linear_cross_entropy(hidden, weight, None, labels)
    assert total.dtype == torch.float32
    exact = F.cross_entropy(hidden.double() @ weight.double().t(), labels, reduction="sum")
    assert total.item() == pytest.approx(exact.item(), rel=1e-3)
    total.backward()
    assert weight.grad.dtype == torch.bfloat16


def test_autocast_computes_in_bf16_and_returns_fp32_gradients():
    hidden, weight, _, labels = case(torch.float32, False)
    with torch.autocast("cpu", torch.bfloat16):
        total = linear_cross_entropy(hidden, weight, None, labels)
    total.backward()
    assert total.dtype == weight.grad.dtype == torch.float32


def test_a_head_shares_the_parameters_it_was_made_of():
    linear = torch.nn.Linear(4, 9)
    head = CrossEntropyHead.of(linear)
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    x = torch.randn(2, 3, 4)
    assert torch.equal(head(x), linear(x))
