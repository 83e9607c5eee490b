"""A cluster that others run, as an acceptance looks at it before it trains there (``muster accept``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from muster.config.spec import RunSpec


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
