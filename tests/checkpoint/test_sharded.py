import copy
import json
import shutil

import pytest
import torch

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.checkpoint import files
from tests.conftest import LanguageModel, ValidatedModel, batches, loader, tiny_llama, weights

DATA = batches(8)


class Stateful(torch.utils.data.DataLoader):
    """A loader that can go on in the middle of an epoch."""

    def __init__(self):
        super().__init__(DATA, batch_size=None)
        self.at = 0

    def __iter__(self):
        for i in range(self.at, len(DATA)):
            self.at = i + 1
            yield DATA[i]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


MAKE = {
    "adamw": None,
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def fit(trainer, model, steps, make=None, ckpt=None, save=None, offload=None, kind="sharded", **options):
    module = LanguageModel(copy.deepcopy(model), make)
    run = trainer(max_steps=steps, strategy=MegaTrainStrategy(offload=offload, state_dict_type=kind), **options)
    run.fit(module, Stateful(), ckpt_path=ckpt)
    if save is not None:
        run.save_checkpoint(save)
    return module, run


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_resuming_equals_never_having_stopped(trainer, tmp_path, precision, name, kind):
    model, path = tiny_llama(tie_word_embeddings=True), tmp_path / "x.ckpt"
    _, whole = fit(trainer, model, 8, MAKE[name], precision=precision)
    fit(trainer, model, 6, MAKE[name], save=path, kind=kind, precision=precision)
    _, resumed = fit(trainer, model, 8, MAKE[name], ckpt=path, kind=kind, precision=precision)
    ours, expected = resumed.strategy.master_state_dict(), whole.strategy.master_state_dict()
    assert all(torch.equal(ours[key], value) for key, value in expected.items())


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_module_that_is_bf16_already_gets_the_exact_masters(trainer, tmp_path, kind):
    model, path = tiny_llama(), tmp_path / "x.ckpt"
    _, first = fit(trainer, model, 3, save=path, kind=kind, precision="bf16-true")
    _, second = fit(trainer, model.bfloat16(), 3, ckpt=path, kind=kind, precision="bf16-true")
    expected = first.strategy.master_state_dict()
    assert any(not torch.equal(value, value.bfloat16().float()) for value in expected.values())
    assert all(torch.equal(second.strategy.master_state_dict()[key], value) for key, value in expected.items())


def test_another_cut_engine_and_precision_load_it(trainer, tmp_path):
    model, path = tiny_llama(), tmp_path / "x.ckpt"
    _, first = fit(trainer, model, 3, save=path, precision="bf16-true")
    expected = first.strategy.master_state_dict()
    _, other = fit(trainer, model, 3, ckpt=path, precision="32-true", offload={"engine": "emulated", "units": ["LlamaMLP"]}, kind="full")
    assert all(torch.equal(other.strategy.master_state_dict()[key], value) for key, value in expected.items())


def test_a_tied_weight_is_saved_once_and_loads_under_both_names(trainer, tmp_path):
    model, path = tiny_llama(tie_word_embeddings=True), tmp_path / "x.ckpt"
    module, _ = fit(trainer, model, 2, save=path)
    index = json.loads((path / "index.json").read_text())
    assert index["aliases"] == {"model.lm_head.weight": "model.model.embed_tokens.weight"}
    again = ValidatedModel(tiny_llama(tie_word_embeddings=True))
    trainer(strategy=MegaTrainStrategy()).validate(again, loader(DATA[:1]), ckpt_path=path, verbose=False)
    assert all(torch.equal(weights(again)[name], value) for name, value in weights(module).items())


@pytest.mark.parametrize("victim", ["unit-00001.safetensors", "trainer.pt"])
def test_a_damaged_checkpoint_is_named_and_touches_nothing(trainer, tmp_path, victim):
    model, path = tiny_llama(), tmp_path / "x.ckpt"
    fit(trainer, model, 2, save=path)
    data = bytearray((path / victim).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (path / victim).write_bytes(data)
    module = LanguageModel(copy.deepcopy(model))
    with pytest.raises(ValueError, match=victim):
        trainer(max_steps=4, strategy=MegaTrainStrategy()).fit(module, Stateful(), ckpt_path=path)
    assert all(torch.equal(weights(module)[name], value) for name, value in weights(LanguageModel(model)).items())


def test_a_model_of_another_shape_is_refused_with_the_names(trainer, tmp_path):
    fit(trainer, tiny_llama(), 1, save=tmp_path / "x.ckpt")
    with pytest.raises(RuntimeError, match=r"missing \[.*layers\.2"):
        fit(trainer, tiny_llama(num_hidden_layers=3), 2, ckpt=tmp_path / "x.ckpt")


def test_a_later_version_is_refused(trainer, tmp_path):
    path = tmp_path / "x.ckpt"
    fit(trainer, tiny_llama(), 1, save=path)
    index = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps(index | {"version": 99}))
    with pytest.raises(ValueError, match="version 99"):
        fit(trainer, tiny_llama(), 2, ckpt=path)


def test_the_previous_one_is_read_where_a_kill_came_between_two_renames(trainer, tmp_path):
    path = tmp_path / "x.ckpt"
    module, _ = fit(trainer, tiny_llama(), 2, save=path)
    path.rename(files.previous(path))
    resumed, _ = fit(trainer, tiny_llama(), 2, ckpt=path)
    assert all(torch.equal(weights(resumed)[name], value) for name, value in weights(module).items())


def test_a_full_checkpoint_takes_the_place_of_a_sharded_one_and_back(trainer, tmp_path):
    path = tmp_path / "x.ckpt"
    for kind in ("sharded", "full", "sharded"):
        fit(trainer, tiny_llama(), 1, save=path, kind=kind)
        assert path.is_dir() is (kind == "sharded")
        fit(trainer, tiny_llama(), 2, ckpt=path)


def test_a_full_disk_leaves_the_last_one(trainer, tmp_path, monkeypatch):
    path = tmp_path / "x.ckpt"
    fit(trainer, tiny_llama(), 1, save=path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        fit(trainer, tiny_llama(), 3, save=path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    shutil.rmtree(path)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_folder_of_something_else_is_never_replaced(trainer, tmp_path, kind):
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "chapter1").write_text("words")
    with pytest.raises(FileExistsError, match="thesis"):
        fit(trainer, tiny_llama(), 1, save=path, kind=kind)
    assert [(file.name, file.read_text()) for file in path.iterdir()] == [("chapter1", "words")]
