"""Files and folders that are whole or not there: safetensors written as they stream, checksums, and an exchange of folders in one step.

Knows bytes and the file system; knows nothing of models.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_CHUNK = 16 << 20  # bytes written and checked at a time
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)


def storable(tensor: Tensor) -> bool:
    """Whether a tensor fits a safetensors file."""
    return tensor.layout == torch.strided and tensor.dtype in _NAMES


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write tensors straight from their memory, and sync the file to the disk.

    Returns its size in bytes and the CRC-32 of its content. The format is that of the safetensors library: the header's length as 8 bytes, the header as
    JSON padded with spaces to 8 bytes, then the data.
    """
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    crc = written = 0
    with path.open("wb") as file:
        for block in _blocks(len(text).to_bytes(8, "little") + text, tensors.values()):
            crc = zlib.crc32(block, crc)
            written += len(block)
            file.write(block)
        sync(file.fileno())
    return {"bytes": written, "crc32": crc}


def _blocks(head: bytes, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    yield memoryview(head)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        raw = memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for at in range(0, len(raw), _CHUNK):
            yield raw[at : at + _CHUNK]


def write_bytes(path: Path, content: bytes) -> dict[str, int]:
    """Write and sync a small file; its size and CRC-32."""
    with path.open("wb") as file:
        file.write(content)
        sync(file.fileno())
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def check(path: Path, expected: Mapping[str, int]) -> None:
    """Raise FileNotFoundError or ValueError, naming the file, unless it has the size and the checksum that were noted when it was written."""
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint file {path} is missing; restore it or use an earlier checkpoint")
    if path.stat().st_size != expected["bytes"]:
        raise ValueError(
            f"checkpoint file {path} has {path.stat().st_size} bytes, expected {expected['bytes']}: it was cut off or replaced; use an earlier checkpoint"
        )
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            crc = zlib.crc32(block, crc)
    if crc != expected["crc32"]:
        raise ValueError(f"checkpoint file {path} is damaged: checksum {crc:08x}, expected {expected['crc32']:08x}; use an earlier checkpoint")


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` in one step when all went well; whatever happens before that, `path` stays what it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{glob.escape(path.name)}.writing-*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    folder = path.parent / f".{path.name}.writing-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
        _sync_folder(folder)
        if path.exists() or path.is_symlink():
            _exchange(folder, path)
        else:
            folder.rename(path)
        _sync_folder(path.parent)
    finally:
        _remove(folder)  # after an exchange this is what was there before


def previous(path: Path) -> Path:
    """Where the last checkpoint is for a moment on file systems that can't exchange two names."""
    return path.parent / f".{path.name}.previous"


def _exchange(a: Path, b: Path) -> None:
    """Swap two names. In one step where the system can; else by way of `previous`, which readers fall back to."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        rename = None
    here = -100  # AT_FDCWD
    if rename is not None and rename(here, os.fsencode(a), here, os.fsencode(b), _EXCHANGE) == 0:
        return
    with set_aside(b):
        a.rename(b)


@contextmanager
def set_aside(path: Path) -> Iterator[None]:
    """While something else takes the place of `path`, what was there is `previous(path)`; it goes when that went well and comes back when not."""
    aside = previous(path)
    if not path.exists():
        yield
        return
    _remove(aside)
    path.rename(aside)
    try:
        yield
    except BaseException:
        _remove(path)
        aside.rename(path)
        raise
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
