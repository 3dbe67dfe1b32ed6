"""Sharded checkpoints: a folder with a safetensors file a unit, and what is left in a small file that loads without pickled code.

    unit-00000.safetensors ...   model/NAME, trail/NAME (split masters), optimizer/I/INDEX/KEY (state of optimizer I's parameter INDEX)
    rest.safetensors             what belongs to no unit: buffers, metric states
    trainer.pt                   the trainer's own state: loops, callbacks, schedules, param_groups
    index.json                   format and version, size and CRC-32 of each file, other names of tied weights

Weights are named, so a checkpoint loads under other units, another engine or another precision. Extra memory is one file's header: tensors are written
from where they are, and read through the page cache.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_megatrain.checkpoint import files
from lightning_megatrain.host.master import combine
from lightning_megatrain.host.store import HostStore

FORMAT, VERSION = "lightning-megatrain-sharded", 1
_INDEX, _TRAINER, _REST = "index.json", "trainer.pt", "rest.safetensors"


def is_sharded(path: Path) -> bool:
    """Whether a path is a sharded checkpoint (or one that was about to be replaced)."""
    return (path / _INDEX).is_file() or (not path.exists() and (files.previous(path) / _INDEX).is_file())


def refuse_other_folder(path: Path) -> None:
    """Raise FileExistsError for a folder with something else than a checkpoint in it, which must not be replaced."""
    if path.is_dir() and not is_sharded(path) and any(path.iterdir()):
        raise FileExistsError(f"{path} is a folder with something else than a checkpoint in it; save to another path")


def save(path: Path, checkpoint: Mapping[str, Any], store: HostStore, parameters: list[list[Tensor]]) -> None:
    """Write a Lightning checkpoint as a folder; `path` is the last whole checkpoint at every moment.

    Args:
        path: the folder.
        checkpoint: as the trainer dumps it; tensors of `state_dict` and `optimizer_states` may be views of the store.
        store: says which tensor belongs to which unit.
        parameters: of each optimizer, in the order of its state.
    """
    shards: dict[str, dict[str, Tensor]] = {_shard(host.unit.index): {} for host in store}
    shards[_REST] = {}
    left: dict[str, Any] = {"state_dict": {}, "optimizer_states": []}
    aliases: dict[str, str] = {}
    saved_as: dict[int, str] = {}
    for name, value in checkpoint.get("state_dict", {}).items():
        place = store.find_weight(value) if isinstance(value, Tensor) else None
        if place is not None and id(place) in saved_as:
            aliases[name] = saved_as[id(place)]
        elif place is not None:
            saved_as[id(place)] = name
            shard = shards[_shard(store.unit_of(place.parameter).unit.index)]
            shard[f"model/{name}"] = place.weight
            if place.trail is not None:
                shard[f"trail/{name}"] = place.trail
        elif isinstance(value, Tensor) and files.storable(value):
            shards[_REST][f"model/{name}"] = value
        else:
            left["state_dict"][name] = value
    for number, (state, members) in enumerate(zip(checkpoint.get("optimizer_states", []), parameters, strict=False)):
        kept: dict[int, dict[str, Any]] = {}
        for index, values in state["state"].items():
            shard = shards[_shard(store.unit_of(members[index]).unit.index) if store.find(members[index]) is not None else _REST]
            for key, value in values.items():
                if isinstance(value, Tensor) and files.storable(value):
                    shard[f"optimizer/{number}/{index}/{key}"] = value
                else:
                    kept.setdefault(index, {})[key] = value
        left["optimizer_states"].append({**state, "state": kept})
    trainer = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    buffer = io.BytesIO()
    torch.save({"trainer": trainer, "left": left, "has_optimizers": "optimizer_states" in checkpoint}, buffer)
    with files.new_folder(path) as folder:
        noted = {name: files.write_safetensors(folder / name, tensors) for name, tensors in shards.items() if tensors}
        noted[_TRAINER] = files.write_bytes(folder / _TRAINER, buffer.getvalue())
        index = {"format": FORMAT, "version": VERSION, "files": noted, "aliases": aliases}
        files.write_bytes(folder / _INDEX, json.dumps(index, indent=1).encode())


def _shard(index: int) -> str:
    return f"unit-{index:05d}.safetensors"


class ShardedWeights(Mapping[str, Tensor]):
    """A state dict that is read as it is asked for: exact fp32 masters where there is a trail, else the weights as saved."""

    def __init__(self, folder: Path, keys: Mapping[str, str], trails: Mapping[str, str], aliases: Mapping[str, str], left: Mapping[str, Any]) -> None:
        self._folder, self._keys, self._trails, self._aliases, self._left = folder, keys, trails, aliases, left

    def __getitem__(self, name: str) -> Any:
        if name in self._left:
            return self._left[name]
        name = self._aliases.get(name, name)
        with safe_open(self._folder / self._keys[name], "pt") as file:
            return self._value(file, name)

    def _value(self, file: Any, name: str) -> Tensor:
        weight: Tensor = file.get_tensor(f"model/{name}")
        return combine(weight, file.get_tensor(f"trail/{name}")) if name in self._trails else weight

    def __iter__(self) -> Iterator[str]:
        return iter([*self._keys, *self._aliases, *self._left])

    def __len__(self) -> int:
        return len(self._keys) + len(self._aliases) + len(self._left)

    def by_file(self) -> Iterator[dict[str, Any]]:
        """All entries, in pieces of one file each: what has to be in memory at once."""
        for shard in dict.fromkeys(self._keys.values()):
            with safe_open(self._folder / shard, "pt") as file:
                part = {name: self._value(file, name) for name, where in self._keys.items() if where == shard}
            yield part | {alias: part[name] for alias, name in self._aliases.items() if name in part}
        yield dict(self._left)


def load_weights(module: nn.Module, weights: ShardedWeights, *, strict: bool) -> None:
    """`module.load_state_dict` from a sharded checkpoint, a file at a time; as strict as torch's.

    Raises RuntimeError with the names that are missing or unexpected, before anything is written.
    """
    own = set(module.state_dict())
    missing, unexpected = sorted(own - set(weights)), sorted(set(weights) - own)
    if strict and (missing or unexpected):
        raise RuntimeError(f"the checkpoint does not fit {type(module).__name__}: missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}")
    if type(module).load_state_dict is not nn.Module.load_state_dict:  # the user's own wants all of it
        module.load_state_dict(dict(weights), strict=strict)
        return
    for part in weights.by_file():
        module.load_state_dict(part, strict=False)


def load(path: Path, *, weights_only: bool) -> dict[str, Any]:
    """The checkpoint as a trainer loads it, after every file's checksum was compared; weights and optimizer state are read as they are asked for.

    Raises FileNotFoundError or ValueError, naming the file, for a checkpoint that is not whole, and ValueError for a later version of the format.
    """
    folder = path if path.exists() else files.previous(path)
    index = json.loads((folder / _INDEX).read_text())
    if index.get("format") != FORMAT or index.get("version", 0) > VERSION:
        raise ValueError(f"{folder / _INDEX}: found {index.get('format')!r} version {index.get('version')}, expected {FORMAT!r} up to version {VERSION}")
    for name, expected in index["files"].items():
        files.check(folder / name, expected)
    content = torch.load(folder / _TRAINER, weights_only=weights_only, map_location="cpu")
    keys: dict[str, str] = {}
    trails: dict[str, str] = {}
    states: list[dict[str, Any]] = [{**state, "state": dict(state["state"])} for state in content["left"]["optimizer_states"]]
    for name in index["files"]:
        if not name.endswith(".safetensors"):
            continue
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118  (not a dict)
                kind, rest = key.split("/", 1)
                if kind == "model":
                    keys[rest] = name
                elif kind == "trail":
                    trails[rest] = name
                else:
                    number, position, field = rest.split("/", 2)
                    states[int(number)]["state"].setdefault(int(position), {})[field] = file.get_tensor(key)
    checkpoint: dict[str, Any] = dict(content["trainer"])
    checkpoint["state_dict"] = ShardedWeights(folder, keys, trails, index["aliases"], content["left"]["state_dict"])
    if content["has_optimizers"]:
        checkpoint["optimizer_states"] = states
    return checkpoint
