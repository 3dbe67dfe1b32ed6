"""Measured: memory and throughput."""
