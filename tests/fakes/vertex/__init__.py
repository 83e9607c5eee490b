"""Vertex AI's custom jobs in memory, as unkind as the documented ones: see ``service.FakeVertex``."""

from fakes.vertex.service import APIS, FakeVertex
from fakes.vertex.workers import VARIANTS, Programs, Variant, Worker

__all__ = ["APIS", "VARIANTS", "FakeVertex", "Programs", "Variant", "Worker"]
