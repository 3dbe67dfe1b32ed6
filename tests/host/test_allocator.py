import torch

from lightning_megatrain.host.allocator import free_bytes, give_back
from lightning_megatrain.monitor.memory import process_bytes


def test_what_the_c_library_keeps_is_given_back():
    large = torch.ones(7_500_000)
    del large  # 30 MB freed: from now on smaller blocks come from the heap
    blocks = [torch.ones(1_000_000) for _ in range(40)]
    top = torch.ones(1_000_000)  # the heap can't shrink below this
    del blocks
    kept = process_bytes()
    if give_back():  # another C library promises nothing
        assert kept - process_bytes() > 100_000_000
    del top


def test_little_is_left_where_it_is():
    assert not give_back(above_bytes=free_bytes() + (1 << 40))
