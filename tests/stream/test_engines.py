import threading

import pytest
import torch

from lightning_megatrain.stream.engines import EmulatedEngine, ThreadStream


@pytest.fixture
def engine():
    engine = EmulatedEngine(16.0, 16.0, 0.0)
    yield engine
    engine.close()


def memory(count, value):
    return torch.full((count,), value, dtype=torch.uint8)


def test_a_stream_does_its_work_in_order(engine):
    target = memory(1000, 0)
    for value in range(1, 50):
        engine.to_device.copy(target, memory(1000, value))
    engine.to_device.record().wait()
    assert (target == 49).all()


def test_a_stream_waits_for_another_ones_event(engine):
    gate = threading.Event()

    class Gate:
        def wait(self):
            gate.wait()

    first, second = memory(10, 0), memory(10, 0)
    engine.to_device.wait(Gate())
    engine.to_device.copy(first, memory(10, 7))
    engine.to_host.wait(engine.to_device.record())
    engine.to_host.copy(second, first)
    done = engine.to_host.record()
    assert (second == 0).all()
    gate.set()
    done.wait()
    assert (second == 7).all()


def test_freed_memory_is_nan_in_every_dtype(engine):
    slot = engine.allocate(64)
    slot.zero_()
    engine.to_device.poison(slot)
    engine.to_device.record().wait()
    assert slot.view(torch.float32).isnan().all()
    assert slot.view(torch.bfloat16).isnan().all()


def test_a_copy_takes_as_long_as_the_bus_would():
    stream = ThreadStream("slow", gbps=0.01, jitter_seconds=0)
    stream.copy(memory(1_000_000, 0), memory(1_000_000, 1))
    stream.record().wait()
    stream.close()
    assert stream.busy_seconds >= 0.1  # 1 MB at 10 MB/s; nothing bounds it from above


def test_an_error_in_a_thread_reaches_whoever_waits(engine):
    class Broken:
        def wait(self):
            raise OSError("the bus is gone")

    engine.to_device.wait(Broken())
    event = engine.to_device.record()
    with pytest.raises(RuntimeError, match="the bus is gone"):
        event.wait()
    with pytest.raises(RuntimeError, match="h2d"):
        engine.check()


def test_a_copy_of_unequal_sizes_is_refused(engine):
    with pytest.raises(ValueError, match="10 elements"):
        engine.to_device.copy(memory(8, 0), memory(10, 0))


def test_close_ends_the_threads():
    before = threading.active_count()
    engine = EmulatedEngine(1.0, 1.0, 0.0)
    assert threading.active_count() == before + 2
    engine.close()
    engine.close()
    assert threading.active_count() == before
