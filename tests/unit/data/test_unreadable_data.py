"""Trouble with reading prepared data is not damage: only what is damaged is removed and prepared again."""

import errno
import os
import re
from pathlib import Path

import pytest

from muster.core.errors import MusterError
from muster.data import cache, sequences
from muster.data.prepare import open_prepared, prepare


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES, errno.ENOMEM])
@pytest.mark.parametrize("name", ["meta.json", "labels.npy"])
def test_data_that_cannot_be_read_once_is_not_removed(make_spec, tmp_path, monkeypatch, number, name):
    spec = make_spec([{"type": "random", "rows": 40}], model={"config": {"vocab_size": 512}})
    prepared = prepare(spec, run_dir=tmp_path / "r")
    inode, troubles = prepared.folder.stat().st_ino, [OSError(number, os.strerror(number))]

    def failing_once(real):
        def call(path, *args, **kwargs):
            if Path(path).name == name and troubles:
                raise troubles.pop()
            return real(path, *args, **kwargs)

        return call

    monkeypatch.setattr(Path, "read_bytes", failing_once(Path.read_bytes))
    monkeypatch.setattr(sequences.np, "load", failing_once(sequences.np.load))
    with pytest.raises(MusterError, match=re.escape(f"cannot be read: [Errno {number}]")):
        open_prepared(spec, tmp_path / "r")
    assert not troubles and prepared.folder.stat().st_ino == inode
    assert prepare(spec, run_dir=tmp_path / "r").stats["cached"]


def test_what_was_read_wrongly_once_is_no_damage(make_spec, tmp_path, monkeypatch):
    spec = make_spec([{"type": "random", "rows": 40}], model={"config": {"vocab_size": 512}})
    train, wrong = prepare(spec, run_dir=tmp_path / "r").train, [b"{}"]
    real = Path.read_bytes

    def read_bytes(path):
        return wrong.pop() if path.name == "meta.json" and wrong else real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert len(open_prepared(spec, tmp_path / "r").train) == len(train) and not wrong


def test_damaged_data_that_a_killed_process_was_removing_are_prepared_again(make_spec, tmp_path, monkeypatch):
    spec = make_spec([{"type": "random", "rows": 40}], model={"config": {"vocab_size": 512}})
    prepared = prepare(spec, run_dir=tmp_path / "r")
    (prepared.folder / "train" / "labels.npy").write_bytes(b"")
    with monkeypatch.context() as killed:
        killed.setattr(cache.shutil, "rmtree", lambda *_, **__: None)
        killed.setattr(Path, "is_symlink", lambda path: path.name != prepared.fingerprint and os.path.islink(path))
        with pytest.raises(MusterError, match="is damaged"):
            open_prepared(spec, tmp_path / "r")
    assert (tmp_path / "cache" / prepared.fingerprint).is_symlink() and prepared.folder.exists()
    again = prepare(spec, run_dir=tmp_path / "r")
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {again.fingerprint, again.folder.name}
