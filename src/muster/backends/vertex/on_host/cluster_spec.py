"""``CLUSTER_SPEC``: which of a job's hosts this one is, and the others' names. Pure, and lenient.

Google documents it for distributed training; jobs have shown other forms: ``job`` as text instead of an object,
``trial`` missing, further keys, names with and without a prefix, and no variable at all where there is one host. So
only ``cluster`` and ``task`` are read::

    {"cluster": {"workerpool0": ["cmle-training-workerpool0-ab-0:2222"], "workerpool1": ["...-0:2222", "...-1:2222"]},
     "environment": "cloud", "task": {"type": "workerpool1", "index": 1, "trial": ""}, "job": "{...}"}

Names stay over restarts, addresses do not; a name may lead to a service that passes on a few ports alone, and does not
resolve before its host is up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from muster.core.errors import BackendError
from muster.core.typed_json import Json, JsonObject, at, child, text, texts

VARIABLE = "CLUSTER_SPEC"
POOLS = ("workerpool0", "workerpool1")
"""The chief's and the other hosts'; the rest are Google's reduction servers and evaluators."""
PORT = 2222
"""Of every host's service, where none is named."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A host of the job by its name in the cluster."""

    name: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Seat:
    """This host among the job's hosts."""

    index: int
    """0: the chief; the others follow in the order of their pool."""
    peers: tuple[Peer, ...]
    """All hosts, this one included, by index; empty for a single host without ``CLUSTER_SPEC``."""

    @property
    def chief(self) -> bool:
        return self.index == 0


def seat(value: str | None, *, hosts: int | None) -> Seat:
    """This host's place, from the variable's value (None: it is not set), in a job of ``hosts`` hosts (None: of as many
    as it names).

    Raises:
        BackendError: it cannot be read, or it is of another number of hosts.
    """
    if not value or not value.strip():
        if hosts in (1, None):
            return Seat(index=0, peers=())
        raise BackendError(f"{VARIABLE} is not set on one of {hosts} hosts", hint="this is not a worker of Vertex AI")
    spec = _object(value)
    pools = [[_peer(one) for one in texts(spec, "cluster", pool)] for pool in POOLS]
    peers = tuple(peer for pool in pools for peer in pool)
    if hosts is not None and len(peers) != hosts:
        raise BackendError(f"{VARIABLE} names {len(peers)} hosts, and the run has {hosts}: {_short(value)}")
    kind, within = text(spec, "task", "type"), _index(at(spec, "task", "index"))
    if kind not in POOLS or within is None or within >= len(pools[POOLS.index(kind)]):
        raise BackendError(f"{VARIABLE} gives this host no place among them: {_short(value)}")
    return Seat(index=within + (len(pools[0]) if kind == POOLS[1] else 0), peers=peers)


def _object(value: str) -> JsonObject:
    try:
        found = child(json.loads(value))
    except (ValueError, RecursionError) as error:
        raise BackendError(f"{VARIABLE} is no JSON: {_short(value)}") from error
    return found


def _peer(named: str) -> Peer:
    name, colon, port = named.rpartition(":")
    if colon and port.isdecimal() and port.isascii() and 0 < int(port[:6]) < 65536:
        return Peer(name=name, port=int(port))
    return Peer(name=named, port=PORT)


def _index(value: Json) -> int | None:
    """A number, also as text."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value[:9])
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _short(value: str) -> str:
    return repr(value if len(value) <= 200 else value[:200] + "...")
