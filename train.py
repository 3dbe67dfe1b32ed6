"""Train a model: `python train.py` with Hydra overrides. `python train.py --help` lists the groups and fields."""

import hydra
from omegaconf import DictConfig

from lightning_megatrain.training import train


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    train(config)


if __name__ == "__main__":
    main()
