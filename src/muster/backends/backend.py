"""A back end as one value: how jobs are run there, what its place is like, and what it asks of a run file.

Another package adds one by an entry point (see ``muster.core.registry``)::

    [project.entry-points."muster.backends"]
    mycluster = "my_package.mycluster:BACKEND"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from muster.backends.cluster import OpenCluster, Rehearse
from muster.backends.protocols import Launcher
from muster.catalog.offers import Option
from muster.config.spec import RunSpec
from muster.core.errors import Problem
from muster.core.typed_json import JsonObject
from muster.core.types import JobRequest, Offer


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What differs between places, as values: nothing outside ``backends/`` asks for a back end's name."""

    uses_this_machine: bool = False
    """Hosts are processes of the machine that submits: the run uses its GPUs, packages and memory for free."""
    secret_manager: bool = False
    """Hosts read the run's ``secrets`` from Google's Secret Manager; else values are read at submission."""
    ships_code: bool = False
    """``workdir`` and a script of ``setup`` reach its hosts."""
    in_google_cloud: bool = False
    """Its machines are a project's: the user's defaults (project, region, bucket) stand in for keys left out."""
    trains_on_tpus: bool = False
    """Its hosts may be TPU machines (``resources.device: tpu``)."""
    renders_tpus: bool = False
    """What such a run would ask for is rendered; it is not submitted."""
    in_regions: bool = False
    """Its machines are a region's: a zone means its region where places are compared."""
    in_zones: bool = False
    """Its machines are a zone's: a plan, whose prices are a region's, names no location of its own."""
    supervised_in_terminal: bool = False
    """``muster train`` and ``muster recover --watch``: the supervisor may run in the foreground."""


@dataclass(frozen=True, kw_only=True)
class RenderedFiles:
    """Texts by relative file name, and warnings about them."""

    files: Mapping[str, str]
    warnings: tuple[Problem, ...] = ()


class Render(Protocol):
    """One format of ``muster render``. Pure: no project, credentials or network."""

    def __call__(self, spec: RunSpec, *, run_id: str, run_dir: str | None, options: JsonObject) -> RenderedFiles: ...


def _no_problems(spec: RunSpec) -> Iterable[Problem]:
    return ()


def _nothing(launcher: Launcher) -> None:
    return None


def _no_keys(spec: RunSpec) -> Iterable[tuple[str, str]]:
    return ()


def _no_image(spec: RunSpec) -> str | None:
    return None


def container_image(spec: RunSpec) -> str | None:
    """``resources.image``: the image where every process of a run is in a container."""
    return spec.resources.image


def _everything(options: Sequence[Option]) -> Sequence[Option]:
    return options


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What a run file may say here. All but ``on_this_machine`` are pure."""

    rules: Callable[[RunSpec], Iterable[Problem]] = _no_problems
    """What a run file may not say here."""
    on_this_machine: Callable[[RunSpec], Iterable[Problem]] = _no_problems
    """What is missing on the machine that submits. Looks, changes nothing."""
    unused: Callable[[RunSpec], Iterable[tuple[str, str]]] = _no_keys
    """(key, reason) of settings that have no effect here."""
    image: Callable[[RunSpec], str | None] = _no_image
    """The image that ranks run in, whose files this machine need not have. None: they run outside any."""
    fixed_keys: tuple[str, ...] = ()
    """Keys of its own that a correction on held hosts cannot change: the hosts were started with them."""


@dataclass(frozen=True, kw_only=True)
class Market:
    """What is sold here, or is there."""

    rents: Callable[[Sequence[Option]], Sequence[Option]] = _everything
    """The catalogue's options as they are to be had here: fewer, or at another price."""
    look: Callable[[RunSpec], Sequence[Offer]] | None = None
    """The machines that are there for the run, asked within seconds; raises MusterError. None: the catalogue's."""
    notes: Callable[[RunSpec, float, float | None], Iterable[str]] | None = None
    """What a plan says of the place: of the run file as planned, seconds of a step, and dollars of all hosts by the
    hour. None: nothing."""


@dataclass(frozen=True, kw_only=True)
class Provisioning:
    """What can be done to the place's machines from here; None: not this."""

    cluster: OpenCluster | None = None
    """Hosts are created and removed."""
    drain: Callable[[str, str], str] | None = None
    """Keeps new work from a machine (its name, a reason), with the rights of the process that calls; what was done, in
    words. Raises AccessError where they do not suffice, BackendError."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What a preflight and an acceptance (``muster accept``) look at before they train; None: there is no such look."""

    access: Callable[[RunSpec, JobRequest], Sequence[str]] | None = None
    """What would prevent this request, in sentences, asked without sending it: limits, quota, when it would
    start. Raises the place's refusal. None: a cluster's ``look`` may say."""
    rehearse: Rehearse | None = None
    """None: a preflight would not be cheaper than the run."""
    site: Callable[[], Site] | None = None
    """A cluster of others."""
    stand_in: Callable[[Launcher], str | None] = _nothing
    """What plays the place's services for this launcher, where it does not speak with them itself: an acceptance by it
    is a rehearsal. None: they are the place's own."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One back end. Importing it must be cheap: ``launcher`` imports what it needs when it is called."""

    name: str
    launcher: Callable[[], Launcher]
    """A new launcher; environment and credentials are read now."""
    capabilities: Capabilities = Capabilities()
    checks: Checks = Checks()
    formats: Mapping[str, Render] = field(default_factory=dict)
    """Formats of ``muster render``, the default one first."""
    market: Market = Market()
    provisioning: Provisioning = Provisioning()
    acceptance: Acceptance = Acceptance()
    move: Callable[[str, str, RunSpec], str] | None = None
    """(run, host, run file with which it goes on): let that host's copy be the run's home, which was lost; what was
    done, in words. None: there are no copies. Raises MusterError."""


class Wait(Protocol):
    """Blocks until ``condition`` holds.

    Raises:
        MusterError: it does not within ``limit_s``, with what ``why`` says then; or what the wait costs is too much.
    """

    def __call__(
        self, condition: Callable[[], object], awaited: str, limit_s: float, why: Callable[[], str] = ...
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What a small job saw."""

    said: str
    kernels: tuple[str, ...]
    """Each host's, by its number since it started: hosts with one number are one machine."""


@dataclass(frozen=True, kw_only=True)
class HeldHost:
    """One of some hosts that are held for a while."""

    words: tuple[str, ...]
    """Before a program there, whose input and output are passed on."""
    python: str
    peer: str
    """Another one's address or name: the route there is the hosts' network."""


class Site(Protocol):
    """One acceptance's. Every spec but ``trial``'s is resolved; sentences are for people."""

    def trial(self, spec: RunSpec) -> RunSpec:
        """The run file as an acceptance sends it: short jobs. Pure."""
        ...

    def look(self, spec: RunSpec, wait: Wait) -> Looked:
        """A small job on as many hosts, on processors alone, that sees what a run's programs need; nothing of it stays.

        Raises:
            MusterError: what is missing, in one sentence.
        """
        ...

    def held(self, spec: RunSpec, wait: Wait) -> AbstractContextManager[Mapping[str, HeldHost]]:
        """A run's hosts with their accelerators and nothing on them, by name; released at the end."""
        ...

    def python(self, spec: RunSpec) -> str:
        """The one on the hosts, outside any container."""
        ...

    def left(self) -> list[str]:
        """What still exists of what ``look`` and ``held`` made, one phrase each; asks for its end once more."""
        ...
