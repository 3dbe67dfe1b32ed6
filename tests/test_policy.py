import pytest

import lightning_megatrain as mt
from lightning_megatrain.policy import parse_bytes


@pytest.mark.parametrize(("text", "expected"), [("8GiB", 8 * 2**30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("12B", 12)])
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(("field", "value", "expected"), [
    ("prefetch_depth", -1, "prefetch_depth.*-1.*at least 0"), ("prefetch_depth", True, "prefetch_depth"), ("recompute", "some", "'auto' or 'all' or 'none'"),
    ("engine", "tpu", "'direct', 'emulated'"), ("resident", "8 bananas", "resident.*8GiB"), ("rows_per_pass", 0, "rows_per_pass"),
    ("emulated_h2d_gbps", 0, "emulated_h2d_gbps"), ("units", [], "units"), ("pin_memory", 1, "pin_memory"),
])  # fmt: skip
def test_a_wrong_value_is_answered_with_the_right_ones(field, value, expected):
    with pytest.raises(ValueError, match=expected):
        mt.OffloadPolicy(**{field: value})


def test_an_unknown_field_is_answered_with_those_that_there_are():
    with pytest.raises(TypeError, match=r"prefetch.*prefetch_depth"):
        mt.OffloadPolicy.of({"prefetch": 2})


def test_a_policy_from_a_mapping_of_hydra():
    from omegaconf import OmegaConf

    policy = mt.OffloadPolicy.of(OmegaConf.create({"_target_": "x", "prefetch_depth": 3, "units": ["A"]}))
    assert policy == mt.OffloadPolicy(prefetch_depth=3, units=("A",))
