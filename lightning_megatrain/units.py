"""Which submodules stream as one.

A `StreamUnit` is what moves at once. A `Site` is a submodule whose call needs units on the device: a block (its own unit), a large leaf, or a
small leftover. A parameter that several sites use (tied weights) is a unit of its own, which each of those sites needs too.
Knows modules and parameters; knows nothing of memory, devices or Lightning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

SMALL_ELEMENTS = 2**16
"""Leaves below this size that are neither Linear nor Embedding are leftovers: a norm is not worth a copy of its own."""


@dataclass(eq=False)
class StreamUnit:
    """Parameters that move at once, in one contiguous host buffer.

    Attributes:
        index: position in the store.
        name: dotted name of the submodule, for people.
        parameters: each parameter once, CPU tensors.
        names: dotted name of each, as `named_parameters` gives it.
        streamed: False for leftovers, which cross one by one.
    """

    index: int
    name: str
    parameters: list[nn.Parameter]
    names: list[str]
    streamed: bool = True


@dataclass(eq=False)
class Site:
    """A submodule whose call needs units on the device.

    Attributes:
        module: the submodule.
        name: its dotted name.
        slots: where the parameters hang: (owning submodule, attribute, unit index, position in the unit).
        units: indices of the units that its call needs.
        recomputable: a block that may run forward again in backward.
        loose: a leftover: parameters cross by a differentiable copy.
    """

    module: nn.Module
    name: str
    slots: list[tuple[nn.Module, str, int, int]] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    recomputable: bool = False
    loose: bool = False


def find_units(root: nn.Module, classes: str | Sequence[str] = "auto") -> tuple[list[StreamUnit], list[Site]]:
    """Units and sites of a module; every parameter of `root` is in exactly one unit.

    Args:
        root: any module; parameters may be on the meta device.
        classes: `"auto"`, or class names of the submodules that stream as one. Leaves outside of those are found as under auto.

    Raises ValueError if a class name matches no submodule, with the names of the repeated classes that there are.
    """
    blocks = set(_repeated_blocks(root, _no_split_classes(root)) if isinstance(classes, str) else _named_blocks(root, classes))
    sites = list({id(site.module): site for site in _sites(root, "", blocks)}.values())
    users: Counter[int] = Counter()
    for site in sites:
        users.update({id(p) for _, _, p in _own_parameters(site)})
    names = {id(p): name for name, p in root.named_parameters()}
    units: list[StreamUnit] = []
    place: dict[int, tuple[int, int]] = {}

    def unit_of(name: str, parameters: Iterable[nn.Parameter], streamed: bool) -> None:
        fresh = [p for p in {id(p): p for p in parameters}.values() if id(p) not in place]
        if fresh:
            for position, p in enumerate(fresh):
                place[id(p)] = (len(units), position)
            units.append(StreamUnit(len(units), name, fresh, [names[id(p)] for p in fresh], streamed))

    for site in sites:
        if not site.loose:
            for _, _, p in _own_parameters(site):
                if users[id(p)] > 1:
                    unit_of(names[id(p)], [p], True)
            unit_of(site.name, (p for _, _, p in _own_parameters(site)), True)
    unit_of("leftovers", (p for site in sites if site.loose for _, _, p in _own_parameters(site)), False)
    for site in sites:
        site.slots = [(owner, attribute, *place[id(p)]) for owner, attribute, p in _own_parameters(site)]
        site.units = list(dict.fromkeys(unit for _, _, unit, _ in site.slots))
    return units, sites


def _own_parameters(site: Site) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(owner, attribute, parameter) of what a site's call uses: its whole subtree, or a leftover's direct parameters."""
    for owner in [site.module] if site.loose else site.module.modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, attribute, parameter


def _sites(module: nn.Module, name: str, blocks: set[int]) -> Iterator[Site]:
    if id(module) in blocks:
        if any(True for _ in module.parameters()):
            yield Site(module, name, recomputable=any(True for _ in module.children()))
        return
    direct = [p for p in module._parameters.values() if p is not None]
    if direct:
        leaf = not any(True for _ in module.children())
        large = isinstance(module, nn.Linear | nn.Embedding) or sum(p.numel() for p in direct) >= SMALL_ELEMENTS
        yield Site(module, name, loose=not (leaf and large))
    for child_name, child in module.named_children():
        yield from _sites(child, f"{name}.{child_name}" if name else child_name, blocks)


def _no_split_classes(root: nn.Module) -> set[str]:
    """Class names that Hugging Face models declare as not to be split."""
    return {name for module in root.modules() for name in (getattr(module, "_no_split_modules", None) or ())}


def _repeated_blocks(module: nn.Module, declared: set[str]) -> Iterator[int]:
    """Ids of the blocks that the model itself declares, and of the outermost ones that a container repeats."""
    listed = isinstance(module, nn.ModuleList | nn.Sequential)
    kinds = Counter(type(child) for child in module.children() if any(True for _ in child.parameters()))
    for child in module.children():
        repeated = listed and kinds[type(child)] > 1 and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if type(child).__name__ in declared or (repeated and not any(type(m).__name__ in declared for m in child.modules())):
            yield id(child)
        else:
            yield from _repeated_blocks(child, declared)


def _named_blocks(root: nn.Module, classes: Sequence[str]) -> Iterator[int]:
    present = Counter(type(module).__name__ for module in root.modules())
    missing = [name for name in classes if name not in present]
    if missing:
        repeated = sorted({type(m).__name__ for m in root.modules() if present[type(m).__name__] > 1 and any(True for _ in m.parameters())})
        raise ValueError(
            f"offload.units: no submodule of class {', '.join(map(repr, missing))} in {type(root).__name__}; "
            f"the classes that occur more than once and hold parameters are {', '.join(repeated) or 'none'}"
        )

    def walk(module: nn.Module) -> Iterator[int]:
        for child in module.children():
            if type(child).__name__ in classes:
                yield id(child)
            else:
                yield from walk(child)

    yield from walk(root)
