"""A small repository of its own for each test."""

import pytest

from tests.unit.plugin.small_repository import Repository


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)
