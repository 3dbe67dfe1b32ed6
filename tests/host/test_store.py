import pytest
import torch
from torch import nn

from lightning_megatrain.host.store import HostStore
from lightning_megatrain.units import find_units
from tests.conftest import stack, tiny_llama


def adopt(module, *, bf16=False, split=True):
    units, _ = find_units(module)
    return HostStore(units, compute_dtype=torch.bfloat16 if bf16 else None, split=bf16 and split, moments_dtype=torch.float32, pin=False)


def test_parameters_stay_the_objects_they_were_with_their_values():
    module = tiny_llama()
    before = {name: (id(p), p.detach().clone()) for name, p in module.named_parameters()}
    adopt(module)
    for name, p in module.named_parameters():
        assert id(p) == before[name][0]
        assert torch.equal(p, before[name][1])


def test_a_units_weights_lie_in_one_buffer():
    module = tiny_llama()
    store = adopt(module)
    for host in store:
        start = host.weights.tensor(0, torch.uint8, (1,)).data_ptr()
        assert all(start <= p.data_ptr() < start + host.nbytes for p in host.unit.parameters)


def test_split_weights_are_exact():
    module = stack()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    store = adopt(module, bf16=True)
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())
    assert all(torch.equal(store.masters()[name], value) for name, value in before.items())


@pytest.mark.parametrize("write", [
    lambda p: p.copy_(torch.full_like(p, 0.3)),
    lambda p: p.data.fill_(0.3),
    lambda p: p.data.copy_(torch.full_like(p, 0.3)),
    lambda p: p.mul_(0).add_(0.3),
])  # fmt: skip
def test_a_master_follows_what_somebody_else_writes(write):
    module = stack()
    store = adopt(module, bf16=True)
    with torch.no_grad():
        write(module[2][0].weight)
    assert store.follow_writes() == ["2.0.weight"]
    assert store.masters()["2.0.weight"].unique().tolist() == [torch.tensor(0.3).bfloat16().item()]
    assert store.follow_writes() == []


def test_replaced_data_is_named():
    module = stack()
    store = adopt(module)
    assert store.find_replaced() is None
    module[1][0].weight.data = torch.zeros(16, 16)
    assert store.find_replaced() == "1.0.weight"


def test_mixed_dtypes_keep_their_own_in_a_model_that_is_bf16_already():
    module = stack().bfloat16()
    module[0][0].float()
    store = adopt(module, bf16=True)
    assert module[0][0].weight.dtype == torch.float32
    assert module[1][0].weight.dtype == torch.bfloat16
    assert store.find(module[0][0].weight).trail is None


def test_a_module_on_the_meta_device_is_refused():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="meta device"):
        adopt(module)
