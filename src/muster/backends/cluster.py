"""A place where hosts are created and removed: ``muster up``, ``muster down RUN.yaml``, ``muster image``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from muster.backends.protocols import Lease
from muster.config.spec import RunSpec
from muster.core.typed_json import JsonObject

Step = Literal[
    "looking", "absent", "making", "waiting", "replacing", "there", "removing", "gone", "kept", "differs", "failed"
]


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
