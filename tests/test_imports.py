"""Imports go downward only: strategy > engine > (stream, optim, checkpoint) > host > units, policy."""

import ast
from pathlib import Path

import lightning_megatrain

ROOT = Path(lightning_megatrain.__file__).parent
LEVELS = {"policy": 0, "units": 0, "host": 1, "stream": 2, "optim": 2, "checkpoint": 2, "monitor": 3, "planning": 3, "engine": 4, "step_mode": 4, "strategy": 5,
          "models": 6, "data": 7, "training": 8, "sweep": 9, "cli": 10, "__main__": 11}  # fmt: skip


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_megatrain."):
            yield node.module.split(".")[1]


def test_imports_go_downward():
    for file in ROOT.rglob("*.py"):
        part = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if part in ("__init__", "conf", "recipes"):
            continue
        for other in imported(file):
            allowed = other == part or LEVELS[other] < LEVELS[part] or (part, other) in SIDEWAYS
            assert allowed, f"{file.relative_to(ROOT)} imports {other}"


SIDEWAYS = {("planning", "monitor")}  # how bytes are written for people


def test_what_must_not_know_of_lightning_does_not_import_it():
    for part in ("policy.py", "units.py", "engine.py", "host", "stream", "optim", "planning"):
        files = [ROOT / part] if part.endswith(".py") else (ROOT / part).rglob("*.py")
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names] if isinstance(node, ast.Import) else []
                assert not any(name.split(".")[0] in ("lightning", "pytorch_lightning") for name in names), file
