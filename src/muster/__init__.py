"""Muster: assemble GPUs, train on them, keep the run alive, account for every second and dollar."""

__version__ = "0.1.0"
