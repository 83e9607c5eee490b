"""Compute Engine in memory, as unkind as the documented one: see ``service.FakeComputeEngine``."""

from fakes.compute_engine.service import FakeComputeEngine

__all__ = ["FakeComputeEngine"]
