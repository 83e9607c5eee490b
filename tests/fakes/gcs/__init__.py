"""A small Google Cloud Storage on loopback: the JSON API with generations and preconditions, in memory.

It exists because the ready-made emulators were found wanting: one lets sixteen of sixteen racing writers win
``ifGenerationMatch=0``, another refuses the multipart bodies of gcsfs. Checked against google-cloud-storage and
gcsfs in ``tests/contract/test_store_contract.py``; every request and answer is checked against the discovery
document, and what that does not know fails the test when the fake is closed.

Done: flat buckets; upload (media, multipart, resumable with status query and cancel); download with ranges and
hashes; list with prefix, delimiter and pages; patch; delete; move, rewrite, copy, compose; batch; soft delete;
preconditions on generation and metageneration; error bodies as the service writes them; the bill. Not done: versions,
ACLs, hierarchical buckets, XML API, gRPC, authentication, ``fields``.

    with GcsFake(buckets=("bucket",)) as fake:      # or, in tests/: python -m fakes.gcs [PORT]
        os.environ["STORAGE_EMULATOR_HOST"] = fake.url

As it stands it is kind, which is right for tests of other things than a bucket's moods. The bucket of a run is
``GcsFake.unkind()``: answers after 60 ms (99 % within 300 ms), one mutation of an object a second and 429 beyond it,
one request in a hundred 503, one in five hundred carried out without an answer.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Mapping
from types import TracebackType

from fakes.gcs.objects import Object, Refused, check, check_name
from fakes.gcs.server import Handler, Server
from fakes.gcs.uploads import Upload, check_sums
from fakes.gcs.weather import Bill, Faults, Latency, Limit, Weather

__all__ = ["Faults", "GcsFake", "Latency", "Object", "Refused"]


class GcsFake:
    """The server.

    ``denied`` buckets answer 403; ``requests`` records (method, path) of every call; ``bill`` counts them by class
    (``bill.classes["A"]``, ``bill.per_hour()``); while ``away`` is true connections end without an answer;
    ``complaints``: what the discovery document does not know. ``host``: the address it listens at ("0.0.0.0" for
    clients behind a bridge, which find it at ``url_at(address)``). ``latency``, ``per_object_per_s`` and ``faults``:
    None is none of it; the draws are of ``seed``.
    """

    def __init__(
        self,
        buckets: Collection[str] = ("bucket",),
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        latency: Latency | None = None,
        per_object_per_s: float | None = None,
        faults: Faults | None = None,
        soft_delete: bool = False,
        seed: int = 0,
    ) -> None:
        self.lock = threading.RLock()
        self.buckets: dict[str, dict[str, Object]] = {name: {} for name in buckets}
        self.soft_deleted: dict[tuple[str, tuple[str, int]], Object] = {}
        self.denied: set[str] = set()
        self.away = False
        self.uploads: dict[str, Upload] = {}
        self.requests: list[tuple[str, str]] = []
        self.complaints: list[str] = []
        self.page_size = 1000
        self.bill = Bill()
        self.limit = Limit(per_object_per_s)
        self.weather = Weather(latency, faults, seed)
        self._soft_delete, self._generation = soft_delete, 0
        self.server = Server((host, port), type("Handler", (Handler,), {"server_fake": self}))
        self.port: int = self.server.server_address[1]
        self.url = self.url_at("127.0.0.1")
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @classmethod
    def unkind(
        cls,
        buckets: Collection[str] = ("bucket",),
        *,
        host: str = "127.0.0.1",
        latency: Latency | None = Latency(),  # noqa: B008 (frozen)
        per_object_per_s: float | None = 1.0,
        faults: Faults | None = Faults(),  # noqa: B008
        seed: int = 0,
    ) -> GcsFake:
        """A run's bucket. Who needs one of the kindnesses names it here."""
        return cls(
            buckets, host=host, latency=latency, per_object_per_s=per_object_per_s, faults=faults, seed=seed,
            soft_delete=True,
        )  # fmt: skip

    def url_at(self, address: str) -> str:
        """For STORAGE_EMULATOR_HOST of a client that sees this machine at ``address``."""
        return f"http://{address}:{self.port}"

    def __enter__(self) -> GcsFake:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.server.shutdown()
        self.server.server_close()
        assert error is not None or not self.complaints, self.complaints

    # ------------------------------------------------------------ the state, under the lock

    def generation(self) -> int:
        """The next: microseconds of the clock, as the service's are, and always rising."""
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        return self._generation

    def bucket(self, name: str) -> dict[str, Object]:
        if name in self.denied:
            raise Refused(403, "forbidden", f"Caller does not have storage.objects access to {name}.")
        if name not in self.buckets:
            raise Refused(404, "notFound", "The specified bucket does not exist.")
        return self.buckets[name]

    def find(self, bucket: str, name: str, query: Mapping[str, str]) -> Object:
        """The object, its preconditions checked."""
        found = self.bucket(bucket).get(name)
        wanted = query.get("generation")
        if query.get("softDeleted") == "true":
            found = self.soft_deleted.get((bucket, (name, int(wanted or 0))))
        if found is None or (wanted is not None and wanted != str(found.generation)):
            raise Refused(404, "notFound", f"No such object: {bucket}/{name}")
        check(found, query)
        return found

    def write(
        self,
        bucket: str,
        name: str,
        data: bytes,
        query: Mapping[str, str],
        content_type: str | None = None,
        metadata: Mapping[str, str] | None = None,
        *,
        components: int = 0,
        wanted: Mapping[str, str] | None = None,
    ) -> Object:
        """Replace the object in one step, if the preconditions hold and the checksums are the ``wanted`` ones."""
        with self.lock:
            check(self.bucket(bucket).get(check_name(name)), query)
            made = Object(bytes(data), 0, metadata=dict(metadata or {}), components=components)
            check_sums(made, wanted or {})
            self.limit.check(bucket, name)
            made.generation, made.content_type = self.generation(), content_type or made.content_type
            return self.place(bucket, name, made)

    def place(self, bucket: str, name: str, made: Object) -> Object:
        self._keep(bucket, name)
        self.buckets[bucket][name] = made
        return made

    def remove(self, bucket: str, name: str) -> None:
        self.limit.check(bucket, name)
        self._keep(bucket, name)
        del self.buckets[bucket][name]

    def _keep(self, bucket: str, name: str) -> None:
        old = self.buckets[bucket].get(name)
        if old is not None and self._soft_delete:
            old.soft_deleted_s = time.time()
            self.soft_deleted[bucket, (name, old.generation)] = old


def main() -> None:
    with GcsFake(port=int(sys.argv[1]) if len(sys.argv) > 1 else 0) as served:
        print(f"STORAGE_EMULATOR_HOST={served.url}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
