"""The file of a run's secrets is its owner's alone; one that others can read is not used."""

import stat

import pytest

from muster.core.errors import AccessError
from muster.storage import run_secrets


def test_written_for_its_owner_alone_and_read_again(tmp_path):
    run_secrets.write(tmp_path, {"KEY": "väl\nue"})
    assert stat.S_IMODE((tmp_path / run_secrets.NAME).stat().st_mode) == 0o600
    assert run_secrets.read(tmp_path) == {"KEY": "väl\nue"}
    run_secrets.write(tmp_path, {})
    assert not list(tmp_path.iterdir()) and run_secrets.read(tmp_path) == {}


@pytest.mark.parametrize("text", ["[]", "{", "", "[" * 100_000])
def test_a_damaged_one_is_said(tmp_path, text):
    (tmp_path / run_secrets.NAME).write_text(text)
    (tmp_path / run_secrets.NAME).chmod(0o600)
    with pytest.raises(AccessError, match=r"secrets\.json"):
        run_secrets.read(tmp_path)


def test_one_that_others_can_read_is_not_used(tmp_path):
    run_secrets.write(tmp_path, {"KEY": "value"})
    (tmp_path / run_secrets.NAME).chmod(0o640)
    with pytest.raises(AccessError, match="others can read"):
        run_secrets.read(tmp_path)
