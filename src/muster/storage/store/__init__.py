"""Small objects under URIs, with the conditional writes that leases, fences and commits need.

``open_store()`` gives one ``Store`` (``core.protocols``) for every scheme: it picks the adapter by the URI and
imports its library then, not before. ``storage.store.blobs`` moves large files under the same URIs.

================  ==================================================  =====================================
scheme            conditional writes                                  generation
================  ==================================================  =====================================
plain, file://    ``link(2)``; ``flock`` and an atomic replace        modification time (forced to rise) + inode
memory://         a lock in this process                              a counter
gs://             ``ifGenerationMatch``                               the object's generation
s3://             ``If-None-Match: *`` and ``If-Match``               ETag (never run here, see ``s3``)
ssh://            as plain paths, on the run's first host             as plain paths
================  ==================================================  =====================================

Where a service is busy (429, 503, a connection that was reset), it is asked again for ``patience_s`` (see ``Patient``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.core.errors import UsageError
from muster.core.protocols import Store, Stored
from muster.storage import uris
from muster.storage.store.local import LocalStore
from muster.storage.store.memory import MemoryStore
from muster.storage.store.patient import Patient

__all__ = ["AnyStore", "LocalStore", "MemoryStore", "open_store"]


@dataclass
class AnyStore:
    """Hands each call to the store of the URI's scheme. Safe to share between threads."""

    adapters: dict[str, Store] = field(default_factory=lambda: {"file": LocalStore(), "memory": MemoryStore()})
    timeout_s: float = 60.0
    patience_s: float = 5.0
    answer_s: float | None = None

    def get(self, uri: str, *, start: int = 0) -> Stored:
        return self._of(uri).get(uri, start=start)

    def put(self, uri: str, data: bytes) -> str:
        return self._of(uri).put(uri, data)

    def put_if_absent(self, uri: str, data: bytes) -> str:
        return self._of(uri).put_if_absent(uri, data)

    def put_if(self, uri: str, data: bytes, generation: str) -> str:
        return self._of(uri).put_if(uri, data, generation)

    def list(self, prefix: str) -> dict[str, int]:
        return self._of(prefix).list(prefix)

    def delete(self, uri: str) -> None:
        self._of(uri).delete(uri)

    def _of(self, uri: str) -> Store:
        scheme = uris.scheme(uri)
        if scheme not in self.adapters:
            found = _open(scheme, uri, self.timeout_s)
            self.adapters[scheme] = Patient(found, deadline_s=self.patience_s, answer_s=self.answer_s)
        return self.adapters[scheme]


def open_store(*, timeout_s: float = 60.0, patience_s: float = 5.0, answer_s: float | None = None) -> AnyStore:
    """A store for every scheme. Nothing is contacted before the first call.

    ``timeout_s``: of a request's connection and of each wait for bytes; ``answer_s``: of a whole request, also where a
    name server is gone, and then in a thread; ``patience_s``: of a call with everything that is asked again.
    """
    return AnyStore(timeout_s=timeout_s, patience_s=patience_s, answer_s=answer_s)


def _open(scheme: str, uri: str, timeout_s: float) -> Store:
    if scheme == "gs":
        from muster.storage.store.gcs import GcsStore

        return GcsStore(timeout_s)
    if scheme == "s3":
        from muster.storage.store.s3 import S3Store

        return S3Store()
    if scheme == "ssh":
        from muster.storage.store.ssh import opened

        return opened()
    raise UsageError(f"{uri!r}: no store for the scheme {scheme!r}", hint="use a path, gs://, s3:// or memory://")
