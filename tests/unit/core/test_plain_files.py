"""Files of a run's folder that somebody sent: what is no regular file is refused at once, and nothing is followed."""

import os

import pytest

from muster.core.processes import open_plain, read_plain


@pytest.fixture
def hostile(tmp_path):
    (tmp_path / "secret").write_text("not yours")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fifo", "no regular file"),
        ("folder", "no regular file"),
        ("link", "a link"),
        ("zero", "a link"),
        ("/dev/zero", "no regular file"),
    ],
)
def test_it_is_refused_without_a_wait(hostile, name, why):
    for read in (open_plain, read_plain):
        with pytest.raises(OSError, match=why):
            read(hostile / name)


def test_a_file_is_read_whole_or_refused_by_its_size(hostile):
    assert read_plain(hostile / "secret") == b"not yours"
    with pytest.raises(OSError, match="more than 8 bytes"):
        read_plain(hostile / "secret", most=8)
    with pytest.raises(FileNotFoundError):
        read_plain(hostile / "absent")
