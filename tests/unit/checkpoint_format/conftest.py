"""Folders of checkpoints in memory and on the disk."""

import uuid

import pytest

from muster.storage.store import open_store


@pytest.fixture(params=["memory", "file"])
def folder(request, tmp_path):
    return str(tmp_path) if request.param == "file" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def store():
    return open_store()
