"""Which of a run's custom jobs may train: one object in the run's home, changed by conditional writes alone.

Whoever asks a region writes the nonce of its request first; a host that wakes puts its job's number beside that nonce,
unless another job's stands there already. So of two jobs that one request made (an answer was lost) one trains, and a
job of an older request, which wakes late, trains never. A job that Vertex restarts as a whole keeps its number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from muster.core.errors import ConflictError
from muster.core.protocols import Store, Stored
from muster.core.typed_json import Count, Int64, Name, Record, decode, encode

FILE = "vertex-job.json"
TRIES = 20
"""Against other writers; each loss means that another one was faster."""


@dataclass(frozen=True, kw_only=True)
class Claim(Record):
    """The newest request, and the job that works for it."""

    nonce: Name
    region: Name
    submission: Count
    job: str = ""
    """``CLOUD_ML_JOB_ID`` of the job whose host woke first; empty: none has."""
    began_wall_ns: Int64 = 0
    """When that host woke: the job's time does not begin again with its containers."""


def ask(store: Store, uri: str, claim: Claim) -> None:
    """Record a request before it is sent: hosts of all older ones do nothing from now on. The same again is one.

    Raises:
        ConflictError: other machines ask for this run at the same time.
    """
    for _ in range(TRIES):
        found = _read(store, uri)
        try:
            if found is None:
                store.put_if_absent(uri, encode(claim))
            elif decode(Claim, found.data).nonce != claim.nonce:
                store.put_if(uri, encode(claim), found.generation)
            return
        except ConflictError:
            continue
    raise ConflictError(f"others keep writing {uri}", hint="one muster command at a time asks for a run")


def counts(store: Store, uri: str, *, nonce: str, job: str, now_ns: int = 0) -> Claim | None:
    """The claim that the host of ``job``, made by the request ``nonce``, works under; it makes it where nobody has.
    None: another job counts, and this one does nothing.

    Raises:
        ConflictError: the object keeps changing.
        MusterError: the home does not answer: ask again, and start nothing before it has.
    """
    for _ in range(TRIES):
        found = _read(store, uri)
        if found is None:
            return None
        held = decode(Claim, found.data)
        if held.nonce != nonce or held.job:
            return held if held.nonce == nonce and held.job == job else None
        try:
            mine = replace(held, job=job, began_wall_ns=now_ns)
            store.put_if(uri, encode(mine), found.generation)
            return mine
        except ConflictError:
            continue  # another host of this job, or of the other one; or this write, whose answer was lost
    raise ConflictError(f"others keep writing {uri}", hint="more than one job of the run wakes at the same time")


def counting(store: Store, uri: str, nonce: str) -> str | None:
    """Number of the job that works for the request ``nonce``; None: no host of it has woken."""
    found = _read(store, uri)
    held = decode(Claim, found.data) if found is not None else None
    return held.job or None if held is not None and held.nonce == nonce else None


def _read(store: Store, uri: str) -> Stored | None:
    try:
        return store.get(uri)
    except FileNotFoundError:
        return None
