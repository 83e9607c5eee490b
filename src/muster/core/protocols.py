"""Small Protocols that adapters implement and tests replace.

A back end is a dataclass that holds the ones it needs (composition; no inheritance).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """Time, as seen by a program. Virtual in tests and in the simulator."""

    def monotonic_ns(self) -> int:
        """Nanoseconds on a clock that never steps back; comparable on one host only."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block for ``seconds``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Completed:
    """What a finished program returned."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


class Shell(Protocol):
    """Runs a program to its end. Always an argument list, never a shell string."""

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        """Run ``argv`` and return what it printed; a non-zero code is data, not an exception.

        Raises:
            BackendError: the program does not exist, or ran past ``timeout_s``.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Stored:
    """An object's bytes and the generation that a conditional write can name."""

    data: bytes
    generation: str


class Store(Protocol):
    """Small objects under ``str`` URIs (``file``, ``memory``, ``gs``, ``s3``; plain paths are files).

    A lease, a fence or a commit is always one of the conditional writes, never a rename: object stores
    have none. Whole objects are written; a reader sees an old version or a new one, never a mix.
    """

    def get(self, uri: str, *, start: int = 0) -> Stored:
        """The object now, from byte ``start`` on, which it has. Raises FileNotFoundError when absent."""
        ...

    def put(self, uri: str, data: bytes) -> str:
        """Write, replacing an existing object; return the new generation."""
        ...

    def put_if_absent(self, uri: str, data: bytes) -> str:
        """Create the object and return its generation; of any number of racing writers one wins.

        Raises:
            ConflictError: the object exists.
        """
        ...

    def put_if(self, uri: str, data: bytes, generation: str) -> str:
        """Replace exactly ``generation`` and return the new one.

        Raises:
            ConflictError: the object is of another generation, or gone.
        """
        ...

    def list(self, prefix: str) -> dict[str, int]:
        """Full URI -> bytes of the objects below ``prefix``, sorted by URI; empty where nothing is.

        In a bucket the list comes in pages, and is not one moment's.
        """
        ...

    def delete(self, uri: str) -> None:
        """Remove the object; absent is success."""
        ...
