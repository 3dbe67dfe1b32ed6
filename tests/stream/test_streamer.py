import pytest
import torch
from torch import nn

from lightning_megatrain.host.store import HostStore
from lightning_megatrain.stream.engines import EmulatedEngine
from lightning_megatrain.stream.slots import SlotPool
from lightning_megatrain.stream.streamer import LayerStreamer, StepTrace
from lightning_megatrain.units import find_units
from tests.conftest import stack


def make(module, depth=2):
    units, _ = find_units(module)
    store = HostStore(units, compute_dtype=None, split=False, moments_dtype=torch.float32, pin=False)
    engine = EmulatedEngine(100.0, 100.0, 0.0005)
    return store, LayerStreamer(engine, store, depth)


@pytest.fixture
def streamer():
    store, streamer = make(stack(6))
    yield store, streamer
    streamer.engine.close()


def walk(streamer, order):
    """Acquire and release in an order; what was seen of each unit's first weight."""
    seen = []
    for unit in order:
        slot = streamer.acquire(unit)
        seen.append(slot.views(streamer._store.units[unit])[0].clone())
        streamer.release(slot)
    return seen


def test_every_unit_arrives_whole_whatever_the_order(streamer):
    store, stream = streamer
    for order in ([0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0], [5, 0, 3, 3, 1, 2]):
        stream.begin("train")
        for unit, seen in zip(order, walk(stream, order), strict=True):
            assert torch.equal(seen, store.units[unit].parameters[0].weight)


def test_a_step_moves_the_weights_twice_less_what_is_there_at_the_turn(streamer):
    store, stream = streamer
    order = [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
    for _ in range(2):
        stream.begin("train")
        before = stream.copied_bytes
        walk(stream, order)
    unit = store.units[0].nbytes
    assert stream.copied_bytes - before == 8 * unit  # four slots: four units stay over the turn-around


def test_the_pool_holds_what_the_plan_says(streamer):
    store, stream = streamer
    for _ in range(3):
        stream.begin("train")
        walk(stream, [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0])
    assert stream.pool.nbytes == 4 * store.units[0].nbytes


THERE_AND_BACK = [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(("spare", "copies"), [(0, 9), (1, 8), (2, 7), (3, 6), (50, 6)])
def test_each_resident_unit_crosses_once_less(spare, copies):
    """Depth 1: three slots hold three units over the turn. One more slot, one copy less; with all six, each crosses once where weights change between passes."""
    store, _ = make(stack(6))
    engine = EmulatedEngine(100.0, 100.0, 0.0)
    unit = store.units[0].nbytes
    stream = LayerStreamer(engine, store, 1, resident=spare * unit)
    for _ in range(3):
        for host in store:  # what an optimizer's step does
            with torch.no_grad():
                host.parameters[0].parameter.add_(1.0)
        stream.begin("train")
        before = stream.copied_bytes
        for order, seen in zip(THERE_AND_BACK, walk(stream, THERE_AND_BACK), strict=True):
            assert torch.equal(seen, store.units[order].parameters[0].weight)
    assert stream.copied_bytes - before == copies * unit
    assert stream.pool.nbytes == min(3 + spare, 6) * unit
    engine.close()


def test_weights_that_nobody_writes_stay_from_pass_to_pass():
    store, _ = make(stack(6))
    engine = EmulatedEngine(100.0, 100.0, 0.0)
    stream = LayerStreamer(engine, store, 1, resident=10 * store.units[0].nbytes)
    copies = []
    for change in (None, None, None, None, 2, None, None):
        if change is not None:
            store.units[change].parameters[0].parameter.data.fill_(7.0)  # raises no version
        stream.begin("train")
        before = stream.copied_bytes
        for order, seen in zip(THERE_AND_BACK, walk(stream, THERE_AND_BACK), strict=True):
            assert torch.equal(seen, store.units[order].parameters[0].weight)
        copies.append((stream.copied_bytes - before) // store.units[0].nbytes)
    assert copies[-4:] == [0, 1, 0, 0]
    engine.close()


def test_weights_written_between_passes_are_sent_again(streamer):
    store, stream = streamer
    stream.begin("eval")
    walk(stream, [0, 1])
    store.units[0].parameters[0].parameter.data.fill_(7.0)
    stream.begin("eval")
    assert (walk(stream, [0])[0] == 7.0).all()


def test_a_released_slot_is_poisoned(streamer):
    _, stream = streamer
    stream.begin("eval")
    slot = stream.acquire(3)
    stream.release(slot)
    stream.engine.to_device.record().wait()
    assert slot.memory.view(torch.float32).isnan().all()


def test_held_units_are_never_taken_away(streamer):
    store, stream = streamer
    stream.begin("train")
    held = [stream.acquire(unit) for unit in range(6)]  # more than the pool foresees: it grows
    for unit, slot in enumerate(held):
        assert torch.equal(slot.views(store.units[unit])[0], store.units[unit].parameters[0].weight)


def test_slots_have_the_sizes_of_their_units():
    """A large embedding doesn't blow up the slots of the blocks."""
    module = nn.Sequential(nn.Embedding(1000, 32), *[nn.Sequential(nn.Linear(32, 32)) for _ in range(4)])
    store, stream = make(module, depth=1)
    for _ in range(2):
        stream.begin("train")
        walk(stream, range(5))
    small = max(host.nbytes for host in store.units[1:])
    assert stream.pool.nbytes == store.units[0].nbytes + 2 * small
    stream.engine.close()


def test_a_trace_looks_ahead_over_what_was_recorded():
    trace = StepTrace()
    for unit in (0, 1, 2, 2, 1, 0):
        trace.note(unit)
    trace.restart()
    trace.note(0)
    assert trace.ahead(2) == [1, 2]
    trace.note(2)  # unit 1 was skipped
    assert trace.ahead(3) == [2, 1, 0]


def test_a_pool_without_room_gives_nothing_ahead_of_time():
    module = stack(3)
    units, _ = find_units(module)
    store = HostStore(units, compute_dtype=None, split=False, moments_dtype=torch.float32, pin=False)
    engine = EmulatedEngine(1.0, 1.0, 0.0)
    pool = SlotPool(engine, store.units, 0)
    for unit in (0, 1):
        slot = pool.take(unit, lambda _: None, must=True)
        slot.unit, slot.leases = unit, 1
    assert pool.take(2, lambda _: None, must=False) is None
    assert pool.take(2, lambda _: None, must=True) is not None
    engine.close()
