"""The tables as typed values. Reading is cached; a malformed row is our own bug and fails loudly.

Unknown numbers are None: code that needs one refuses and names it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from muster.core.errors import UsageError
from muster.core.flops import ModelShape
from muster.core.typed_json import JsonObject

GIGA = 10**9
Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of chip."""

    name: str
    kind: str
    """gpu or tpu."""
    memory_bytes: int
    memory_bytes_per_s: float | None
    peak_flops: Mapping[str, float | None]
    """Dense peak by precision (bf16, fp8, mxfp8, fp16)."""
    matmul_flops: Mapping[str, float]
    """Best matrix multiplication measured by anybody, by precision."""
    origin: str
    reliability: str
    mfu: float | None = None
    """Of a TPU: the share of its peak that useful operations are planned to reach."""
    attention_flops: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Kernel -> head dimension -> useful causal FLOP/s of both passes at long documents."""

    def attention_rate(self, kernel: str, head_dim: int) -> float | None:
        """FLOP/s of an attention kernel: of the largest head dimension known that is no larger. None: unknown."""
        rates = self.attention_flops.get(kernel, {})
        return max(((size, rate) for size, rate in rates.items() if size <= head_dim), default=(0, None))[1]

    def ceiling(self, share: float, precision: str = "bf16") -> tuple[float | None, bool]:
        """(matmul ceiling in FLOP/s, measured?). Without a measurement: the peak times ``share``."""
        measured = self.matmul_flops.get(precision)
        if measured:
            return measured, True
        peak = self.peak_flops.get(precision)
        return (None if peak is None else peak * share), False


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine type."""

    name: str
    family: str
    accelerator: str
    count: int
    intra_bytes_per_s: float | None
    """A GPU's link to its neighbours in the machine, one direction."""
    network_bytes_per_s: float | None
    """All NICs of the data network together, one direction (line rate)."""
    busbw_bytes_per_s: float | None
    """Published NCCL bus bandwidth between two machines."""
    modes: tuple[str, ...]
    origin: str
    topologies: Mapping[str, int] | None = None
    """Of a TPU: slice (``4x4``) -> hosts."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A number that is known within bounds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way of buying."""

    name: str
    title: str
    max_hours: float | None
    quota: str
    network_factor: float
    """Share of the fabric's bandwidth that remains without compact placement."""
    failures_per_node_day: float
    preemptions_per_node_day: Rate
    rules: tuple[str, ...]
    origin: str


@dataclass(frozen=True, kw_only=True)
class Price:
    """List price of a machine in a mode and region, per GPU."""

    machine: str
    mode: str
    region: str
    usd_per_gpu_hour: float
    low: float
    high: float
    date: str
    reliability: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Storage:
    """What one kind of bucket costs."""

    name: str
    usd_per_1000_writes: float
    """Class A: writes and lists."""
    usd_per_1000_reads: float
    """Class B."""
    usd_per_gib_hour: float
    reliability: str
    origin: str
    usd_per_gib_in: float = 0.0
    usd_per_gib_out: float = 0.0


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model whose shape needs no hub."""

    name: str
    shape: ModelShape
    parameters: int
    """As the hub shows them."""


@cache
def accelerators() -> Mapping[str, Accelerator]:
    """Every chip by name."""
    return typed(
        Accelerator,
        {
            name: {
                **row,
                "memory_bytes": round(row["memory_gb"] * GIGA),
                "memory_bytes_per_s": _times(row["memory_tb_s"], 1e12),
                "peak_flops": {key: _times(value, 1e12) for key, value in row["peak_tflops"].items()},
                "matmul_flops": {key: _times(value, 1e12) for key, value in row["matmul_tflops"].items()},
                "attention_flops": {
                    kernel: {size: _times(value, 1e12) for size, value in rates.items()}
                    for kernel, rates in row.get("attention_tflops", {}).items()
                },
            }
            for name, row in table("accelerators.yaml")["accelerators"].items()
        },
    )


@cache
def machines() -> Mapping[str, Machine]:
    """Every machine type by name."""
    return typed(
        Machine,
        {
            name: {
                **row,
                "intra_bytes_per_s": _times(row["intra_gb_s"], GIGA),
                "network_bytes_per_s": _times(row["network_gbps"], GIGA / 8),
                "busbw_bytes_per_s": _times(row["busbw_gb_s"], GIGA),
            }
            for name, row in table("machines.yaml")["machines"].items()
        },
    )


@cache
def modes() -> Mapping[str, Mode]:
    """Every consumption mode by name."""
    return typed(Mode, table("modes.yaml")["modes"])


@cache
def storage() -> Mapping[str, Storage]:
    """Prices of buckets, by kind: flat, hierarchical, cache, rapid."""
    return typed(Storage, table("storage.yaml")["storage"])


@cache
def shipped_prices() -> tuple[Price, ...]:
    """The list prices that ship."""
    return tuple(prices_from(_text("prices.csv"), source="prices.csv"))


def prices_from(text: str, *, source: str) -> Iterable[Price]:
    """Rows of a price file (the columns of ``tables/prices.csv``; low, high, date, reliability, source may be empty).

    Raises:
        UsageError: a row that is none, with its line.
    """
    lines = text.splitlines()  # at every kind of line end: csv raises at a lone carriage return inside a line
    reader = csv.DictReader(line for line in lines if line.strip() and not line.startswith("#"))
    requested = {"machine", "mode", "region", "usd_per_gpu_hour"}
    if not requested <= set(reader.fieldnames or ()):
        missing = ", ".join(sorted(requested - set(reader.fieldnames or ())))
        raise UsageError(f"{source}: no column {missing}", hint="columns: machine,mode,region,usd_per_gpu_hour")
    for number, row in enumerate(reader, start=2):
        try:
            usd = float(row["usd_per_gpu_hour"])
            low, high = (float(row.get(key) or usd) for key in ("low", "high"))
        except (ValueError, TypeError) as error:  # TypeError: the row ends before the column
            raise UsageError(f"{source}:{number}: {error}", hint="prices are dollars per GPU and hour") from error
        if not 0 <= low <= usd <= high:
            raise UsageError(f"{source}:{number}: needs 0 <= low <= usd <= high, got {low}, {usd}, {high}")
        if row["machine"] not in machines() or row["mode"] not in modes():
            raise UsageError(f"{source}:{number}: no machine {row['machine']!r} or no mode {row['mode']!r}")
        yield Price(
            machine=row["machine"],
            mode=row["mode"],
            region=row["region"],
            usd_per_gpu_hour=usd,
            low=low,
            high=high,
            date=row.get("date") or "undated",
            reliability=row.get("reliability") or "user",
            source=row.get("source") or source,
        )


@cache
def models() -> Mapping[str, KnownModel]:
    """Shapes of common open models by hub name."""
    return {
        name: KnownModel(name=name, shape=ModelShape.from_config(row["config"]), parameters=row["parameters"])
        for name, row in table("models.yaml")["models"].items()
    }


def find_model(name: str) -> KnownModel | None:
    """A shipped model by hub id, case-insensitive; instruction-tuned names share their base's shape."""
    known = {key.lower(): model for key, model in models().items()}
    requested = name.lower()
    stem = requested.removesuffix("-it").removesuffix("-instruct")
    bases = [requested.removesuffix(suffix) for suffix in ("", "-instruct", "-chat", "-base", "-it", "-hf", "-pt")]
    return next((known[base] for base in (*bases, stem + "-pt", stem + "-base", stem + "-hf") if base in known), None)


def weights_bytes(name: str) -> int | None:
    """Bytes of a shipped model's weights as the hub has them, two a parameter (bfloat16); None: not shipped."""
    model = find_model(name)
    return None if model is None else 2 * model.parameters


IMAGE_AND_FILES_GB, STEP_GB = 200, 100


def boot_disk_gb(source: str | None) -> int:
    """Room on a host's disk for its image, temporary files and twice the weights of ``source`` where their size is
    known, in steps of 100 GB."""
    needed = IMAGE_AND_FILES_GB + 2 * ((weights_bytes(source) if source else None) or 0) / GIGA
    return math.ceil(needed / STEP_GB) * STEP_GB


def table_date(name: str) -> str:
    """When a table was last checked."""
    return str(table(name)["date"])


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else float(value) * factor


def typed(kind: type[Row], table: Mapping[str, JsonObject]) -> dict[str, Row]:
    """Rows by name as values of the dataclass ``kind``; what it has no field for is for people."""
    from pydantic import TypeAdapter

    rows = {name: {"name": name, **row} for name, row in table.items()}
    return TypeAdapter(dict[str, kind]).validate_python(rows)  # type: ignore[valid-type]


@cache
def table(name: str, folder: str = "tables") -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe").load(_text(name, folder))


def _text(name: str, folder: str = "tables") -> str:
    return resources.files("muster.catalog").joinpath(folder, name).read_text(encoding="utf-8")
