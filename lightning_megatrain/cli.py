"""`megatrain`: the console script. Each command takes the same Hydra overrides as train.py, and works from any folder.

megatrain train model=tiny_llama trainer.max_steps=50
megatrain plan model=llama70b precision=bf16
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig

_USAGE = """usage: megatrain COMMAND [Hydra overrides]

commands:
  train    train a model, as train.py does
  plan     what a run will hold in memory; nothing is allocated

groups and fields: megatrain train --help
a recipe:          megatrain train -cn smollm2_135m_gsm8k data.path=train.jsonl"""


def config_folder() -> Path:
    """conf/ of the checkout, or the copy that the wheel carries."""
    return _folder("conf", "train.yaml")


def recipe_folder() -> Path:
    """recipes/ of the checkout, or the copy that the wheel carries."""
    return _folder("recipes", "smollm2_135m_gsm8k.yaml")


def _folder(name: str, file: str) -> Path:
    checkout = Path(__file__).parent.parent / name
    return checkout if (checkout / file).is_file() else Path(__file__).parent / name


def main() -> None:
    """Run the command named by the first argument."""
    commands = {"train": _train, "plan": _plan}
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(_USAGE)
        return
    if name not in commands:
        raise SystemExit(f"megatrain: found {'no command' if not name else f'the command {name!r}'}, expected one of {', '.join(commands)}\n\n{_USAGE}")
    rest = sys.argv[2:]
    if not any(argument in ("-cd", "--config-dir") or argument.startswith("--config-dir=") for argument in rest):
        rest = ["--config-dir", str(recipe_folder()), *rest]  # so that -cn finds the recipes from anywhere
    sys.argv = [f"megatrain {name}", *rest]
    _run(commands[name])


def _run(command: Callable[[DictConfig], None]) -> None:
    hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="train")(command)()


def _train(config: DictConfig) -> None:
    from lightning_megatrain.training import train

    train(config)


def _plan(config: DictConfig) -> None:
    from lightning_megatrain.training import print_plan

    print_plan(config)
