"""The timeline: what was recorded, the floor worked out by hand, and files that open."""

import json

import pytest
import torch

from lightning_megatrain.monitor.timeline import Piece, Step, Timeline, TimelineWriter
from lightning_megatrain.stream.record import Lane
from tests.conftest import LanguageModel, batches, loader, tiny_llama


def piece(lane, begin, end, *, backward=False, unit="a", index=0):
    return Piece(lane, unit, index, backward, begin, end, 0)


def test_the_floor_is_that_of_each_pass_by_itself():
    pieces = [
        piece(Lane.TO_DEVICE, 0.0, 4.0), piece(Lane.COMPUTE, 1.0, 3.0),  # forward: 4 in, 2 compute
        piece(Lane.COMPUTE, 4.0, 9.0, backward=True), piece(Lane.TO_DEVICE, 5.0, 7.0), piece(Lane.TO_HOST, 6.0, 7.0, backward=True),  # backward: 5 compute, 2 in, 1 out
    ]  # fmt: skip
    step = Step(pieces, 10.0, in_place=False)
    assert step.floor == pytest.approx(4 + 5)
    assert Step([*pieces, piece(Lane.UPDATE, 0.0, 9.5)], 10.0, in_place=False).floor == pytest.approx(9.5)
    assert Step([p for p in pieces if p.lane is Lane.COMPUTE] + [piece(Lane.UPDATE, 9, 10)], 10.0, in_place=True).floor == pytest.approx(2 + 5 + 1)


def test_gaps_are_named_with_what_was_waited_for():
    pieces = [
        piece(Lane.COMPUTE, 0, 1),
        piece(Lane.TO_DEVICE, 0, 3, unit="b", index=1),
        piece(Lane.COMPUTE, 3, 4, unit="b", index=1),
        piece(Lane.COMPUTE, 4.5, 5, backward=True),
    ]
    gaps = Step(pieces, 5.0, in_place=False).gaps()
    assert [(gap.seconds, gap.before) for gap in gaps] == [(2, "b (forward)"), (0.5, "a (backward)")]
    assert "weights" in gaps[0].waited_for
    assert "other" in gaps[1].waited_for


@pytest.mark.parametrize("engine", ["direct", "emulated"])
@pytest.mark.parametrize("step", ["overlap_backward", "overlap_forward"])
def test_a_run_records_every_lane(trainer, engine, step):
    run = trainer(max_steps=4, offload={"engine": engine, "optimizer_step": step, "prefetch_depth": 1})
    run.fit(LanguageModel(tiny_llama(num_hidden_layers=5)), loader(batches(4)))
    timeline = run.strategy.timeline()
    last = timeline.last
    for backward in (False, True):
        blocks = {p.unit for p in last.pieces if p.lane is Lane.COMPUTE and p.backward == backward}
        assert {f"model.model.layers.{i}" for i in range(5)} <= blocks
    assert last.busy(Lane.UPDATE) > 0
    assert (last.busy(Lane.TO_DEVICE) > 0) == (last.busy(Lane.TO_HOST) > 0) == (engine == "emulated")
    assert all(0 <= p.begin <= p.end for p in last.pieces)
    assert 0 < last.floor < 1.05 * last.seconds
    assert "of what the hardware allows" in str(timeline)


def test_copies_take_what_the_bus_gives(trainer):
    run = trainer(max_steps=3, offload={"engine": "emulated", "emulated_h2d_gbps": 0.005})
    run.fit(LanguageModel(tiny_llama()), loader(batches(3)))
    copies = [p for p in run.strategy.timeline().last.pieces if p.lane is Lane.TO_DEVICE]
    assert copies
    assert all(p.seconds >= p.nbytes / 0.005e9 * 0.99 for p in copies)


def test_the_callback_writes_a_trace_and_a_picture(trainer, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run = trainer(max_steps=3, callbacks=[TimelineWriter(str(tmp_path / "out"))], offload={"engine": "emulated"})
    run.fit(LanguageModel(tiny_llama()), loader(batches(3)))
    events = json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {lane.value for lane in Lane}
    assert sum(e["ph"] == "X" for e in events) > 20
    assert (tmp_path / "out" / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    assert "floor" in capsys.readouterr().out


def test_before_a_step_there_is_none():
    with pytest.raises(ValueError, match="no training step"):
        _ = Timeline([]).last
    assert torch.is_grad_enabled()
