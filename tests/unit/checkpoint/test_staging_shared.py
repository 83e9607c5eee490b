"""A share staged in memory that another process can be given."""

import errno
import os

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint import staging  # noqa: E402
from muster.checkpoint.staging import Staging  # noqa: E402


def state(value):
    return {"w": torch.full((5, 3), float(value)), "half": torch.full((7,), float(value), dtype=torch.bfloat16)}


def test_what_is_copied_can_be_read_through_the_descriptor():
    made = Staging(state(0), None, shared=True)
    for value in (1, 2):
        made.copy(state(value))
        for chunk in made.local_chunks:
            data = os.pread(made.fd, chunk.bytes, chunk.byte_offset)
            assert torch.frombuffer(bytearray(data), dtype=getattr(torch, chunk.dtype)).eq(value).all()
    with pytest.raises(OSError, match=os.strerror(errno.EPERM)):
        os.ftruncate(made.fd, 1)  # whoever reads it must not meet its end


def test_it_goes_with_its_owner():
    made = Staging(state(0), None, shared=True)
    fd = made.fd
    del made
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)


def test_without_room_the_rank_keeps_its_share_to_itself(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(staging.os, "posix_fallocate", full)
    made = Staging(state(0), None, shared=True)
    made.copy(state(3))
    assert made.fd is None and len(made.buffer)


def test_a_rank_without_a_share_has_nothing_to_give():
    assert Staging({"empty": torch.zeros((0, 3))}, None, shared=True).fd is None
