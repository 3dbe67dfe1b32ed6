import pytest
import torch
from safetensors.torch import load_file

from lightning_megatrain.checkpoint.files import check, new_folder, previous, write_safetensors


def test_what_is_written_is_what_the_library_reads(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randint(-9, 9, (4, 2), dtype=torch.int16), "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4), "strided": torch.randn(4, 6).t(), "flag": torch.tensor([True, False]),
    }  # fmt: skip
    noted = write_safetensors(tmp_path / "x.safetensors", tensors)
    back = load_file(tmp_path / "x.safetensors")
    assert set(back) == set(tensors)
    assert all(torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in tensors.items())
    assert noted["bytes"] == (tmp_path / "x.safetensors").stat().st_size
    check(tmp_path / "x.safetensors", noted)


@pytest.mark.parametrize(("harm", "expected"), [("cut", "cut off"), ("flip", "damaged"), ("gone", "missing")])
def test_a_file_that_is_not_whole_is_named(tmp_path, harm, expected):
    path = tmp_path / "x.safetensors"
    noted = write_safetensors(path, {"a": torch.ones(100)})
    data = bytearray(path.read_bytes())
    if harm == "cut":
        path.write_bytes(data[:-10])
    elif harm == "flip":
        data[-3] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=rf"x\.safetensors.*{expected}"):
        check(path, noted)


def test_a_folder_takes_the_place_of_the_last_in_one_step(tmp_path):
    for content in ("one", "two"):
        with new_folder(tmp_path / "c") as folder:
            (folder / "file").write_text(content)
    assert (tmp_path / "c" / "file").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_failure_while_writing_leaves_the_last_one_and_no_litter(tmp_path):
    with new_folder(tmp_path / "c") as folder:
        (folder / "file").write_text("one")
    with pytest.raises(OSError, match="disk is full"), new_folder(tmp_path / "c") as folder:
        (folder / "file").write_text("two")
        raise OSError("disk is full")
    assert (tmp_path / "c" / "file").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_what_a_killed_process_left_is_cleared(tmp_path):
    (tmp_path / ".c.writing-999999").mkdir()
    with new_folder(tmp_path / "c") as folder:
        (folder / "file").write_text("one")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_file_system_without_exchange_goes_by_way_of_the_previous_one(tmp_path, monkeypatch):
    import ctypes

    class NoExchange:
        @staticmethod
        def renameat2(*_):
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: NoExchange)
    for content in ("one", "two"):
        with new_folder(tmp_path / "c") as folder:
            (folder / "file").write_text(content)
    assert (tmp_path / "c" / "file").read_text() == "two"
    assert not previous(tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_set_aside_comes_back_after_a_failure(tmp_path, kind):
    from lightning_megatrain.checkpoint.files import set_aside

    path = tmp_path / "c"
    if kind == "folder":
        path.mkdir()
        (path / "file").write_text("one")
    else:
        path.write_text("one")
    with pytest.raises(OSError, match="disk is full"), set_aside(path):
        path.write_text("half")
        raise OSError("disk is full")
    assert (path / "file" if kind == "folder" else path).read_text() == "one"
    with set_aside(path):
        assert previous(path).exists()
        path.write_text("two")
    assert path.read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
