import pytest
import torch

from lightning_megatrain.host.master import combine, split_


def split(values):
    high, trail = torch.empty(values.shape, dtype=torch.bfloat16), torch.empty(values.shape, dtype=torch.int16)
    split_(values, high, trail)
    return high, trail


def patterns():
    """Signed zeros, subnormals, ties, the largest values, infinities, and 100,000 random patterns without NaN."""
    special = [0x0, 0x1, 0x7FFF, 0x8000, 0x8001, 0x3F800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F8000, 0x00800000, 0x007FFFFF, 0x7F800000]
    bits = torch.cat(
        [torch.tensor(special, dtype=torch.int32), torch.randint(0, 0x7F800000, (100_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))]
    )
    return torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])


def test_every_pattern_comes_back():
    values = patterns()
    assert torch.equal(combine(*split(values)).view(torch.int32), values.view(torch.int32))


def test_the_high_plane_is_the_nearest_bf16():
    values = patterns()
    values = values[values.abs() < 3e38]
    high, _ = split(values)
    near = values.to(torch.bfloat16)  # ties to even: the distance is the same
    assert torch.equal((high.double() - values.double()).abs(), (near.double() - values.double()).abs())


@pytest.mark.parametrize(("bits", "expected"), [(0x3F808000, 0x3F81), (0x3F818000, 0x3F82), (0x3F807FFF, 0x3F80)])
def test_a_tie_goes_away_from_zero(bits, expected):
    high, _ = split(torch.tensor([bits], dtype=torch.int32).view(torch.float32))
    assert high.view(torch.int16).item() == expected


def test_a_nan_of_any_pattern_stays_one_in_both_planes():
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, 0x7F80FFFF - (1 << 32) + (1 << 31)], dtype=torch.int64).to(torch.int32).view(torch.float32)
    nans = nans[nans.isnan()]
    high, trail = split(nans)
    assert high.isnan().all()
    assert combine(high, trail).isnan().all()
