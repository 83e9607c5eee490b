"""Small sealed files: whatever the bytes are, what they make Python raise is a CheckpointError."""

import pytest

from muster.checkpoint_format import decoding
from muster.core.errors import CheckpointError


def test_what_can_be_read_but_not_written_again_is_damage(monkeypatch):
    """How deep JSON may be nested for either differs between versions of Python."""
    data = decoding.seal({"a": [[1]]}, format=2, kind="commit marker")

    def too_deep(body):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(decoding, "_canonical", too_deep)
    with pytest.raises(CheckpointError, match="not a commit marker: maximum recursion"):
        decoding.unseal(data, reads=2, kind="commit marker")
