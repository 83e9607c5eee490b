"""A bucket as a table: strongly consistent, with generations; it can be killed, refuse, or lose an answer at the n-th
request, and take virtual time."""

import threading
from collections import Counter
from dataclasses import replace

from muster.core.errors import BusyError, ConflictError
from muster.core.protocols import Stored


class Killed(BaseException):
    """The process ends here."""


class Objects:
    """A ``Store``. ``faults``: number of a request -> ``refused`` (nothing done), ``lost`` (done, no answer), ``killed
    before``, ``killed after``. ``took``: called with each request's method, for latency. ``down``: refuses everything.
    """

    def __init__(self, faults=None, took=lambda method: None):
        self.held = {}
        self.faults = dict(faults or {})
        self.took = took
        self.down = False
        self.counts = Counter()
        self.uploaded = 0
        self.requests = 0
        self.most = 0
        self.lock = threading.RLock()
        self._generation = 0

    def get(self, uri, *, start=0):
        return self._ask("get", lambda: self._got(uri, start))

    def put(self, uri, data):
        return self._ask("put", lambda: self._put(uri, data))

    def put_if_absent(self, uri, data):
        return self._ask("put", lambda: self._put(uri, data, absent=True))

    def put_if(self, uri, data, generation):
        return self._ask("put", lambda: self._put(uri, data, generation=generation))

    def list(self, prefix):
        folder = prefix.rstrip("/") + "/"
        return self._ask("list", lambda: {uri: len(self.held[uri].data) for uri in self.uris(folder)})

    def delete(self, uri):
        self._ask("delete", lambda: self.held.pop(uri, None))

    def uris(self, prefix):
        """Below ``prefix``, without a request."""
        return [uri for uri in sorted(self.held) if uri.startswith(prefix.rstrip("/") + "/")]

    @property
    def class_a(self):
        """Requests that Google counts as writes and lists."""
        return self.counts["put"] + self.counts["list"]

    def _ask(self, method, work):
        with self.lock:
            number, self.requests = self.requests, self.requests + 1
            self.counts[method] += 1
            fault = self.faults.get(number)
            self.took(method)
            if fault == "killed before":
                raise Killed
            if fault == "refused" or self.down:
                raise BusyError("429")
            result = work()
            self.most = max(self.most, len(self.held))
            if fault == "killed after":
                raise Killed
            if fault == "lost":
                raise BusyError("connection reset")
            return result

    def _got(self, uri, start):
        if uri not in self.held:
            raise FileNotFoundError(uri)
        return replace(self.held[uri], data=self.held[uri].data[start:])

    def _put(self, uri, data, absent=False, generation=None):
        found = self.held.get(uri)
        if (absent and found) or (generation is not None and (found is None or found.generation != generation)):
            raise ConflictError(uri)
        self._generation += 1
        self.uploaded += len(data)
        self.held[uri] = Stored(data=bytes(data), generation=str(self._generation))
        return str(self._generation)
