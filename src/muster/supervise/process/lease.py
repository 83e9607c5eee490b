"""The supervisor's lease: one object in the run's folder, changed by conditional writes alone.

Whoever holds it may act. ``term`` rises by one with each holder and is never used twice, so two
supervisors can never both believe for long: a renewal that loses its condition ends its process at once.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.core.clock import SystemClock
from muster.core.errors import ConflictError, MusterError
from muster.core.protocols import Clock, Store

#: A holder that has not renewed for so long may be replaced (a dead one on this host at once).
LEASE_S = 10.0


@dataclass
class LeaseKeeper:
    """Takes, renews and gives back the lease at ``uri``."""

    store: Store
    uri: str
    clock: Clock = field(default_factory=SystemClock)
    term: int = 0
    _generation: str = ""
    _until_ns: tuple[int, int] = (0, 0)
    """When it runs out, by the monotonic clock (which may stand still with the machine) and by the wall's."""
    _unsure: bool = False
    """A renewal failed half-way: the object may be ours under another generation."""
    _address: tuple[str, int] | None = None

    def take(self, address: tuple[str, int]) -> int:
        """Become the holder; return the new term.

        Raises:
            ConflictError: a living supervisor holds it, or another one was faster.
        """
        self._address = address
        try:
            found = self.store.get(self.uri)
        except FileNotFoundError:
            self.term = 1
            self._write(None)
            return self.term
        record = _parse(found.data)
        if not self._vacant(record):
            raise ConflictError(
                f"a supervisor (pid {record.get('pid')} on {record.get('machine')}) holds this run",
                hint="muster status shows it; muster stop ends it",
            )
        self.term = int(record.get("term", 0)) + 1
        self._write(found.generation)
        return self.term

    def hold(self) -> None:
        """Make sure that the lease is ours at this moment; costs nothing while it has not run out.

        Call it before acting on anything: a process that was stopped, or whose machine was, wakes up with its inputs
        waiting and perhaps with a successor. Raises ConflictError then.
        """
        if self._ran_out():
            self.renew()

    def renew(self) -> bool:
        """Say that we live; False where the store does not take it now (a full disk): try again soon.

        That is borne with until the lease has run out, and from then on as long as the store shows that nobody else
        has it. Raises ConflictError when the lease was taken from us, or might be: stop acting at once.
        """
        try:
            self._write(self._generation)
        except ConflictError:
            if not self._unsure or not self._shown_as_ours():
                raise
            self._write(self._generation)
        except (MusterError, OSError) as error:
            self._unsure = True
            if self._ran_out() and not self._shown_as_ours():
                raise ConflictError(f"the lease ran out and could not be renewed: {error}") from error
            return False
        self._unsure = False
        return True

    def _write(self, generation: str | None) -> None:
        """Put our record in the place of ``generation`` (None: of nothing)."""
        length = int(LEASE_S * 1e9)
        until_ns = (self.clock.monotonic_ns() + length, self.clock.wall_ns() + length)
        record = self._record()
        if generation is None:
            self._generation = self.store.put_if_absent(self.uri, record)
        else:
            self._generation = self.store.put_if(self.uri, record, generation)
        self._until_ns = until_ns

    def _ran_out(self) -> bool:
        monotonic, wall = self._until_ns
        return self.clock.monotonic_ns() >= monotonic or self.clock.wall_ns() >= wall

    def _shown_as_ours(self) -> bool:
        """Whether the store holds our own record, under whatever generation."""
        try:
            found = self.store.get(self.uri)
        except (MusterError, OSError):
            return False
        record = _parse(found.data)
        ours = (self.term, os.getpid(), socket.gethostname(), boot_id())
        if tuple(record.get(key) for key in ("term", "pid", "machine", "boot_id")) != ours:
            return False
        self._generation = found.generation
        return True

    def give_back(self) -> None:
        """Leave; a successor needs no waiting."""
        record = {**json.loads(self._record()), "expires_wall_ns": 0, "address": None, "pid": 0}
        try:
            self.store.put_if(self.uri, json.dumps(record).encode(), self._generation)
        except (MusterError, OSError):
            pass  # it is another's, or it runs out by itself

    def _record(self) -> bytes:
        return json.dumps(
            {
                "term": self.term,
                "address": list(self._address) if self._address else None,
                "pid": os.getpid(),
                "machine": socket.gethostname(),
                "boot_id": boot_id(),
                "expires_wall_ns": self.clock.wall_ns() + int(LEASE_S * 1e9),
                "expires_mono_ns": self.clock.monotonic_ns() + int(LEASE_S * 1e9),
            }
        ).encode()

    def _vacant(self, record: dict[str, Any]) -> bool:
        """Whether nobody holds it. On the holder's own machine its wall clock has no say: somebody may have set it."""
        if not int(record.get("expires_wall_ns", 0)):
            return True
        ran_out = self.clock.wall_ns() >= int(record["expires_wall_ns"])
        if record.get("boot_id") != boot_id() or record.get("machine") != socket.gethostname():
            return ran_out
        if "expires_mono_ns" in record:
            ran_out = self.clock.monotonic_ns() >= int(record["expires_mono_ns"])
        return ran_out or not alive(int(record.get("pid", 0)))


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def boot_id() -> str:
    """The kernel's name for this boot; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _parse(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
