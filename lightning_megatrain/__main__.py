"""`python -m lightning_megatrain`: the same as `megatrain`."""

from lightning_megatrain.cli import main

main()
