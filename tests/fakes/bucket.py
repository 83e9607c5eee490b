"""A bucket in this process: what a ``gs://`` URI names, for code that is given its store. Counts what it is asked."""

from collections import Counter

from muster.core.errors import AccessError
from muster.core.protocols import Stored
from muster.storage.store import MemoryStore


class Bucket:
    """The ``Store`` of ``gs://``; while ``closed``, nobody may read or write it."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.asked: Counter[str] = Counter()
        self.closed = False

    def get(self, uri: str, *, start: int = 0) -> Stored:
        return self._of("get").get(uri, start=start)

    def put(self, uri: str, data: bytes) -> str:
        return self._of("put").put(uri, data)

    def put_if_absent(self, uri: str, data: bytes) -> str:
        return self._of("put").put_if_absent(uri, data)

    def put_if(self, uri: str, data: bytes, generation: str) -> str:
        return self._of("put").put_if(uri, data, generation)

    def list(self, prefix: str) -> dict[str, int]:
        held = self._of("list").list(prefix)
        return {uri.replace("memory://", "gs://", 1): size for uri, size in held.items()}

    def delete(self, uri: str) -> None:
        self._of("delete").delete(uri)

    def _of(self, what: str) -> MemoryStore:
        self.asked[what] += 1
        if self.closed:
            raise AccessError("403: storage.objects.get denied")
        return self.memory
