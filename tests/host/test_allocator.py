import torch

from lightning_megatrain.host.allocator import HeapWatch, free_bytes, give_back
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


def test_room_for_the_next_steps_activations_is_kept_and_holes_beyond_it_are_not():
    large = torch.ones(7_500_000)
    del large  # 30 MB freed: from now on smaller blocks come from the heap
    if not give_back():
        return  # another C library: nothing to watch
    small = 20_000_000
    watch = HeapWatch()
    before = free_bytes()
    activations = [torch.ones(1_000_000) for _ in range(20)]
    top = torch.ones(1_000_000)  # the heap can't shrink below this
    watch.note()
    del activations
    assert not watch.settle(before + small), "80 MB are free, which the next step will take again"
    assert free_bytes() > 80_000_000
    assert watch.settle(small), "no backward pass since: nothing will be taken again"
    del top
