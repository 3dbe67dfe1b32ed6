import pytest
import torch

from lightning_megatrain.optim import HostAdamW


def test_fp32_equals_torch_to_the_bit():
    torch.manual_seed(0)
    ours = torch.nn.Linear(64, 64)
    plain = torch.nn.Linear(64, 64)
    plain.load_state_dict(ours.state_dict())
    a, b = HostAdamW(ours.parameters(), lr=1e-2, weight_decay=0.1), torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(5):
        x = torch.randn(8, 64)
        for net, optimizer in ((ours, a), (plain, b)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), plain.parameters(), strict=True))


def test_a_bf16_weight_moves_by_less_than_its_own_resolution():
    """400 steps of 1e-5 on 1.0 end at 0.9959946 (worked out in fp32); plain bf16 never leaves 1.0."""
    split, plain = (torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2))
    a, b = HostAdamW([split], lr=1e-5, weight_decay=0.0), HostAdamW([plain], lr=1e-5, weight_decay=0.0, master="none")
    for _ in range(400):
        for p, optimizer in ((split, a), (plain, b)):
            p.grad = torch.ones_like(p)
            optimizer.step()
    torch.testing.assert_close(a.masters()[0], torch.full((64,), 0.9959946), rtol=0, atol=2e-7)
    assert (plain == 1.0).all()


def test_state_goes_through_a_state_dict_unrounded():
    p = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = HostAdamW([p], lr=1e-3)
    p.grad = torch.randn(64).bfloat16()
    optimizer.step()
    q = torch.nn.Parameter(p.detach().clone())
    other = HostAdamW([q], lr=1e-3)
    other.load_state_dict(optimizer.state_dict())
    for x, y in ((p, optimizer), (q, other)):
        x.grad = torch.full((64,), 0.5, dtype=torch.bfloat16)
        y.step()
    assert torch.equal(optimizer.masters()[0], other.masters()[0])
    assert other.state[q]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "expected"), [({"lr": -1.0}, "lr"), ({"betas": (0.9, 1.0)}, "betas"), ({"master": "fp64"}, "'split' or 'none'"), ({"moments": "int8"}, "bf16")]
)
def test_a_wrong_setting_is_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        HostAdamW([torch.nn.Parameter(torch.ones(2))], **options)


def test_a_dtype_that_the_kernel_lacks_is_refused():
    with pytest.raises(ValueError, match="float16"):
        HostAdamW([torch.nn.Parameter(torch.ones(2, dtype=torch.float16))])
