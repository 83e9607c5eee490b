"""The software of hosts: packed the same twice, named by its digest, refused without what hosts need."""

import hashlib
import sys
import tarfile

import pytest

from muster.backends.gce import bundle
from muster.core.errors import UsageError


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("muster_gpu-1.0-py3-none-any", "pip-24.0-py3-none-any", "pydantic_core-2.1-cp312-cp312-linux_x86_64"):
        (folder / f"{name}.whl").write_bytes(name.encode())
    return folder


def test_packed_twice_is_one_object_named_by_its_digest(wheels, tmp_path):
    first, second = bundle.pack(wheels, tmp_path / "a"), bundle.pack(wheels, tmp_path / "b")
    assert first.name == second.name and first.read_bytes() == second.read_bytes()
    assert first.name == hashlib.sha256(first.read_bytes()).hexdigest() + ".tar.gz"
    with tarfile.open(first) as packed:
        lines = packed.extractfile("requirements.txt").read().decode().splitlines()
        assert {one for one in packed.getnames() if one.startswith("wheels/")} == {
            f"wheels/{path.name}" for path in wheels.iterdir()
        }
    assert [line.partition(" --hash=sha256:")[0] for line in lines] == ["muster_gpu==1.0", "pydantic_core==2.1"]
    digest = hashlib.sha256(b"muster_gpu-1.0-py3-none-any").hexdigest()
    assert lines[0].endswith(digest)


def test_what_hosts_would_miss_is_said_here(wheels, tmp_path, monkeypatch, capsys):
    with pytest.raises(UsageError, match="bin/python3"):
        bundle.pack(wheels, tmp_path / "a", python=tmp_path)
    (wheels / "pip-24.0-py3-none-any.whl").unlink()
    with pytest.raises(UsageError, match="no wheel of pip"):
        bundle.pack(wheels, tmp_path / "a")
    monkeypatch.setattr(sys, "argv", ["bundle", str(wheels), str(tmp_path)])
    assert bundle.main() == 2 and "hint: pip wheel" in capsys.readouterr().err
