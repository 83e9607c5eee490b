"""What hosts get through a run's home: one object named by its digest, checked before anything of it is used."""

import uuid

import pytest

from muster.backends import code_bundle, run_folder
from muster.backends.run_folder import RunFiles
from muster.core.errors import AccessError, BackendError
from muster.storage.store import MemoryStore

HOME = f"memory://{uuid.uuid4().hex}/runs/llama"
FILES = RunFiles(
    resolved='{"name": "llama"}\n', run_yaml="name: llama\n", code=code_bundle.archive({"a.py": b"print(1)"})
)


def test_what_was_put_is_what_comes():
    store = MemoryStore()
    sha256 = run_folder.put(store, HOME, FILES.encoded())
    assert run_folder.put(store, HOME, FILES.encoded()) == sha256, "the same again is one object"
    assert run_folder.get(store, HOME, sha256) == FILES
    bare = RunFiles(resolved="{}", run_yaml="")
    assert run_folder.get(store, HOME, run_folder.put(store, HOME, bare.encoded())).code is None


def test_another_object_of_that_name_is_refused():
    store = MemoryStore()
    sha256 = run_folder.put(store, HOME, FILES.encoded())
    store.put(f"{HOME}/run-files/{sha256}", RunFiles(resolved="{}", run_yaml="x").encoded())
    with pytest.raises(BackendError, match="does not have its digest"):
        run_folder.get(store, HOME, sha256)


def test_nothing_there_and_no_answer(monkeypatch):
    with pytest.raises(BackendError, match="is not there"):
        run_folder.get(MemoryStore(), HOME, "0" * 64)
    monkeypatch.setattr(run_folder, "RETRY_S", 0.0)
    asked = []

    class Closed(MemoryStore):
        def get(self, uri):
            asked.append(uri)
            if len(asked) < 4:
                raise AccessError("403")
            return super().get(uri)

    home = f"{HOME}-late"
    sha256 = run_folder.put(MemoryStore(), home, FILES.encoded())
    assert run_folder.get(Closed(), home, sha256) == FILES, "a grant that comes late"
    asked.clear()
    with pytest.raises(AccessError):
        run_folder.get(Closed(), home, sha256, patience_s=-1.0)
