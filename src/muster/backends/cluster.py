"""A place where hosts are created and removed: ``muster up``, ``muster down RUN.yaml``, ``muster image``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from muster.backends.protocols import Lease
from muster.config.spec import RunSpec, Training
from muster.core.typed_json import JsonObject
from muster.storage import run_registry

Step = Literal[
    "looking", "absent", "making", "waiting", "replacing", "there", "removing", "gone", "kept", "differs", "failed"
]
STEPS = 2
LARGEST_VOCABULARY = 262_144
"""More than any published tokenizer that we know of: a vocabulary's size is not known before it is loaded."""
TINY: JsonObject = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": LARGEST_VOCABULARY,
    "max_position_embeddings": 32_768,
}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One resource that is about to be inspected, created or removed."""

    key: str
    needs: tuple[str, ...] = ()
    bills: str | None = None
    """What it costs by the hour from the moment it exists; None: nothing."""
    usd_per_hour: float | None = None
    """None: not known."""


@dataclass(frozen=True, kw_only=True)
class Began:
    """Work on these resources starts now; a new picture."""

    title: str
    making: bool
    nodes: tuple[Planned, ...]


@dataclass(frozen=True, kw_only=True)
class Changed:
    """One of them is now at another step."""

    key: str
    step: Step
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Said:
    """A message next to the picture."""

    text: str


Event = Began | Changed | Said
Progress = Callable[[Event], None]


def silent(event: Event) -> None:
    """Progress that is not shown."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A resource of ours that still exists."""

    kind: str
    name: str
    bills: str | None
    """What it is billed for; None: it costs nothing."""
    kept: bool = False
    usd_per_day: float | None = None
    """About; None: nothing, or not known."""

    def sentence(self) -> str:
        cost = "" if self.usd_per_day is None else f", about ${self.usd_per_day:.2f} a day"
        return (
            f"{self.kind}/{self.name}"
            + (" (kept)" if self.kept else "")
            + (f": bills {self.bills}{cost}" if self.bills else "")
        )


@dataclass(frozen=True, kw_only=True)
class Down:
    """What is left after everything of ours was removed."""

    troubles: tuple[str, ...]
    leftovers: tuple[Leftover, ...]

    @property
    def clean(self) -> bool:
        """Nothing of ours bills except what was kept on purpose."""
        return not self.troubles and all(leftover.kept for leftover in self.leftovers)


class Request(Protocol):
    """One request of a dry run."""

    def shown(self) -> str:
        """As text; a secret body is left out."""
        ...

    def to_json(self) -> JsonObject:
        """For programs; a secret body is left out."""
        ...


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image that can be built for a run file's machine."""

    name: str
    doubts: tuple[str, ...]
    """Warnings about parts that may not fit each other."""
    calls: Callable[[], Sequence[Request]]
    """What building it sends."""
    build: Callable[[], bool]
    """Build it and wait; False: it existed already. Raises BackendError, AccessError."""


class Cluster(Protocol):
    """The cluster of one run file. ``manifests`` is a folder of released manifests; None: fetched and kept."""

    @property
    def project(self) -> str: ...

    def dry_run(self, manifests: Path | None) -> tuple[Sequence[Request], Sequence[str]]:
        """Every request that ``up`` would send to create something, and what it would refuse. Touches nothing."""
        ...

    def look(self) -> Sequence[str]:
        """What ``up`` would find: sentences about access and quota. Asks, makes nothing but what makes Google answer.

        Raises:
            AccessError, CapacityError: what is in its way.
        """
        ...

    def pin(self, manifests: Path | None) -> tuple[Mapping[str, str], Path]:
        """Record the manifests' hashes for this user; returns them by address, and the file that holds them."""
        ...

    def up(self, manifests: Path | None, *, token: str | None = None, progress: Progress = silent) -> Lease:
        """Create what is missing at the first location with room; after an interruption, the same again resumes.

        ``token`` is Hugging Face's. The lease's labels name the ``zone``.

        Raises:
            UsageError: manifests are missing from the folder, or not pinned.
            AccessError, ConflictError, CapacityError, BackendError: the provider's.
        """
        ...

    def down(self, *, keep_data: bool = False, progress: Progress = silent) -> Down:
        """Remove everything of ours at every location, then list what still exists."""
        ...

    def image(self, *, base: str | None = None, torch: str | None = None, torch_index: str | None = None) -> Image:
        """The image for the run file's machine. Touches nothing.

        Raises:
            UsageError: parts that do not fit each other.
        """
        ...


class OpenCluster(Protocol):
    """Opens the cluster of a run file; touches nothing. ``adopt``: use one of that name that is not ours.

    Raises:
        UsageError: the run file names no project, zone or machine.
    """

    def __call__(self, spec: RunSpec, *, zone: str | None = None, adopt: bool = False) -> Cluster: ...


class Rehearse(Protocol):
    """A small run file of a large one (``muster preflight``): two steps on one small machine; None: a CPU node."""

    def __call__(self, spec: RunSpec, *, machine: str | None = None, mode: str | None = None) -> RunSpec: ...


def rehearsal(
    spec: RunSpec, *, machine: str | None = None, mode: str | None = None, queue: str | None = None
) -> RunSpec:
    """The run file of the rehearsal; without ``machine`` it runs on the cluster's CPU nodes, by ``queue`` if given."""
    placed: JsonObject = {
        "machine": machine,
        "device": "auto" if machine else "cpu",
        "queue": None if machine else queue,
        "provisioning_model": (mode or "spot") if machine else "owned",
    }
    return small(spec, placed)


def small(spec: RunSpec, placed: JsonObject) -> RunSpec:
    """The rehearsal's run file with one rank on one host; ``placed``: what ``resources`` says of that host."""
    document = spec.model_dump(mode="json")
    name = run_registry.slug(spec.name, 50) + "-preflight"
    document |= {"name": name, "run_dir": f"{spec.run_dir.rstrip('/')}-preflight" if spec.run_dir else None}
    document["resources"] |= {
        "hosts": 1, "min_hosts": None, "spare_hosts": 0, "ranks_per_host": 1, "threads_per_rank": None,
        "accelerator": None, "reservation": None, **placed,
    }  # fmt: skip
    document["recovery"] |= {
        "policy": "default",
        "keep_hosts_after_failure_s": 0.0,
        "max_restarts_without_progress": 0,
        "warm_standby": False,
    }
    document["limits"] = {"max_hours": 1.0}
    directory = spec.checkpoint.dir
    document["checkpoint"] |= {
        "every_steps": 1,
        "asynchronous": False,
        "resume": False,
        "keep_last": 1,
        "dir": f"{directory.rstrip('/')}/preflight/{name}" if directory else None,
    }
    if spec.model is not None:
        document["training"] |= _training(spec.training)
        document["parallelism"] |= {"dp_replicate": 1, "dp_shard": -1, "tp": 1}
        document["evaluation"] |= {"every_steps": 0, "at_start": False, "num_sequences": 0,
                                   "num_questions": 0, "samples": 0, "final_num_questions": None}  # fmt: skip
        # The tokenizer is the real one's, so that its gate is opened and its data are cut by it.
        tokenizer = document["model"]["tokenizer"] or document["model"]["source"]
        document["model"] |= {"source": None, "revision": None, "config": TINY, "tokenizer": tokenizer,
                              "dtype": "float32", "attention": "auto"}  # fmt: skip
    return RunSpec.model_validate(document, strict=False)


def _training(training: Training) -> JsonObject:
    return {
        "steps": STEPS,
        "epochs": None,
        "global_batch_size": training.micro_batch_size,
        "sequence_length": min(2048, training.sequence_length),
        "compile": False,
        "profile": {"trace_step": None, "memory_step": None},
    }
