"""Checkpoints: folders of safetensors files, written a unit at a time."""
