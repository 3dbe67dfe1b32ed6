import torch

from lightning_megatrain.host.buffer import HostBuffer


def test_each_tensor_has_a_storage_of_its_own_size():
    buffer = HostBuffer(1024)
    tensor = buffer.tensor(256, torch.float32, (4, 8))
    assert tensor.untyped_storage().nbytes() == 4 * 8 * 4
    assert tensor.data_ptr() % 64 == 0


def test_tensors_over_the_same_bytes_share_them_and_start_at_zero():
    buffer = HostBuffer(64)
    a, b = buffer.tensor(0, torch.float32, (4,)), buffer.tensor(0, torch.float32, (2, 2))
    assert a.tolist() == [0, 0, 0, 0]
    a.fill_(3)
    assert b.tolist() == [[3, 3], [3, 3]]


def test_memory_outlives_the_buffer_while_a_tensor_does():
    tensor = HostBuffer(64).tensor(0, torch.float32, (4,))
    tensor.fill_(2)
    assert tensor.sum() == 8


def test_it_knows_whether_somebody_still_reads_it():
    buffer = HostBuffer(64)
    assert not buffer.referenced
    alias = buffer.tensor(0, torch.float32, (4,))[1:]
    assert buffer.referenced
    del alias
    assert not buffer.referenced


def test_a_parameter_without_elements_has_a_place():
    assert HostBuffer(0).tensor(0, torch.float32, (0, 3)).shape == (0, 3)
