"""What tests of a model on one rank share."""

import pytest


@pytest.fixture(scope="module")
def group():
    """A world of one for the module."""
    from fakes.small_model import process_group

    with process_group():
        yield
