"""Init program of hosts: one of them copies a model from the hub into the run's bucket, the others wait for it.

Run as ``python -m muster.backends.gke.pod.weights --source ORG/NAME [--revision R] --copies gs://BUCKET/muster-weights``.
The copy is complete once its last object, ``complete``, is there, and is then every run's that names the same model and
revision. Who copies holds an object of the same folder that is renewed each minute and belongs to the next one after
five; the files that are there already stay. A file is on this machine's disk only while it goes through.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from muster.core.clock import SystemClock
from muster.core.errors import BackendError, ConflictError, MusterError, UsageError
from muster.core.protocols import Clock, Store
from muster.storage import uris
from muster.storage.model_copies import COMPLETE, copy_name
from muster.storage.store import open_store

CLAIM = "copying"
RENEW_S, STALE_S, LOOK_S = 60.0, 300.0, 5.0
UPLOAD_S = 1800.0
"""For one file: shards have 5 GB."""
ENDINGS = (".safetensors", ".json", ".model", ".txt", ".jinja")


class Hub(Protocol):
    """What is used of the Hugging Face hub."""

    def files(self, source: str, revision: str | None) -> tuple[str, Sequence[str]]:
        """(commit, names of the files at the top that a model is read from)."""
        ...

    def download(self, source: str, commit: str, name: str, into: Path) -> Path: ...


@dataclass(kw_only=True)
class Copy:
    """One model's copy in a bucket."""

    store: Store
    hub: Hub
    copies: str
    source: str
    revision: str | None
    me: str
    clock: Clock = field(default_factory=SystemClock)
    scratch: Path | None = None
    _generation: str | None = None

    @property
    def uri(self) -> str:
        return uris.join(self.copies, copy_name(self.source, self.revision))

    def ensure(self) -> str:
        """Return once the copy is complete, and by whom.

        Raises:
            UsageError: no such model, or it is not ours to read.
            MusterError: the hub or the bucket does not answer.
        """
        said = False
        while not self._is_complete():
            if self._claimed():
                return self._copy()
            if not said:
                print(f"another host copies {self.source} to {self.uri}", file=sys.stderr, flush=True)
            said = True
            self.clock.sleep(LOOK_S)
        return "there already"

    def _is_complete(self) -> bool:
        return self._read(COMPLETE) is not None

    def _read(self, name: str) -> bytes | None:
        try:
            return self.store.get(uris.join(self.uri, name)).data
        except FileNotFoundError:
            return None

    def _claimed(self) -> bool:
        """Claim the copy. False: another host copies, and has renewed its claim within five minutes."""
        uri = uris.join(self.uri, CLAIM)
        try:
            stored = self.store.get(uri)
        except FileNotFoundError:
            generation = None
        else:
            if self.clock.wall_ns() - int(json.loads(stored.data)["wall_ns"]) < STALE_S * 1e9:
                return False
            generation = stored.generation
        try:
            self._put_claim(generation)
        except ConflictError:
            return False
        return True

    def _put_claim(self, generation: str | None) -> None:
        uri, data = uris.join(self.uri, CLAIM), json.dumps({"by": self.me, "wall_ns": self.clock.wall_ns()}).encode()
        put = self.store.put_if_absent(uri, data) if generation is None else self.store.put_if(uri, data, generation)
        self._generation = put

    def _copy(self) -> str:
        commit, names = self.hub.files(self.source, self.revision)
        if not any(name.endswith(".safetensors") for name in names):
            raise UsageError(f"{self.source} has no safetensors at its top", hint="model.weights: hub")
        there = {uris.name(uri) for uri in self.store.list(uris.join(self.uri, commit))}
        with _every(RENEW_S, self._renew) as renewal:
            for name in names:
                if name not in there:
                    self._bring(commit, name)
                renewal.check()
        record = {"source": self.source, "commit": commit, "files": list(names)}
        self.store.put(uris.join(self.uri, COMPLETE), json.dumps(record).encode())
        return f"copied {len(names)} files, {len(there)} of them before"

    def _bring(self, commit: str, name: str) -> None:
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            path = self.hub.download(self.source, commit, name, Path(folder))
            self.store.put(uris.join(self.uri, commit, name), path.read_bytes())
        print(f"copied {name}", file=sys.stderr, flush=True)

    def _renew(self) -> None:
        self._put_claim(self._generation)


class _Renewal:
    def __init__(self) -> None:
        self.error: MusterError | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class _every:
    """Calls ``work`` in a thread, every so often, until the block ends; a lost condition is raised by ``check``."""

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds, self._work = seconds, work
        self._over, self._renewal = threading.Event(), _Renewal()
        self._thread = threading.Thread(target=self._run, name="claim", daemon=True)

    def __enter__(self) -> _Renewal:
        self._thread.start()
        return self._renewal

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            try:
                self._work()
            except ConflictError as error:
                self._renewal.error = error
                return
            except MusterError as error:
                print(f"the claim could not be renewed: {error}", file=sys.stderr, flush=True)


class HuggingFace:
    """The hub itself."""

    def files(self, source: str, revision: str | None) -> tuple[str, Sequence[str]]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        try:
            info = HfApi().model_info(source, revision=revision)
        except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
            kind = type(error).__name__
            hint = "check the name and revision, and the Secret with the hub's token"
            raise UsageError(f"model.source: {source} is not available on the hub ({kind})", hint=hint) from error
        except Exception as error:
            raise BackendError(f"model.source: the hub does not answer for {source}: {error}") from error
        names = [one.rfilename for one in info.siblings or []]
        return str(info.sha), sorted(name for name in names if "/" not in name and name.endswith(ENDINGS))

    def download(self, source: str, commit: str, name: str, into: Path) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(source, name, revision=commit, local_dir=into))
        except Exception as error:
            raise BackendError(f"{source}: {name} cannot be downloaded: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True)
    parser.add_argument("--revision")
    parser.add_argument("--copies", required=True, help="gs://BUCKET/FOLDER of all copies")
    given = parser.parse_args()
    store = open_store(timeout_s=UPLOAD_S, patience_s=UPLOAD_S)
    copy = Copy(
        store=store, hub=HuggingFace(), copies=given.copies, source=given.source, revision=given.revision,
        me=os.uname().nodename, scratch=Path(os.environ.get("HF_HOME", tempfile.gettempdir())),
    )  # fmt: skip
    began = time.monotonic()
    try:
        done = copy.ensure()
    except MusterError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    print(f"{copy.uri}: {done} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
