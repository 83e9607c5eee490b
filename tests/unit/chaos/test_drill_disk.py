"""A drill's disk: made, filled to the last block, freed, taken away."""

import os
from types import SimpleNamespace

import pytest
from fakes.told import Told

from muster.chaos.catalog import MENU
from muster.chaos.network import Disk
from muster.core.errors import UsageError


def test_it_is_as_large_as_what_lies_in_it_and_then_large_again(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=100, f_bfree=60, f_frsize=4096))
    shell = Told()
    disk = Disk(folder=tmp_path / "checkpoints", shell=shell)
    disk.up()
    assert disk.fill() is True
    disk.free()
    disk.down()
    at = str(tmp_path / "checkpoints")
    assert shell.said == [
        f"mount -t tmpfs -o mode=0700 muster-drill {at}",
        f"mount -o remount,size={40 * 4096} {at}",
        f"mount -o remount,size=100% {at}",
        f"umount --lazy {at}",
    ]


def test_an_empty_one_is_not_made_without_a_limit(tmp_path, monkeypatch):
    """To tmpfs a size of 0 is no limit at all."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=100, f_bfree=100, f_frsize=4096))
    shell = Told()
    Disk(folder=tmp_path, shell=shell).fill()
    assert "size=4096" in shell.said[-1]


def test_what_came_in_meanwhile_is_no_error_and_the_rest_is(tmp_path, monkeypatch):
    shell = Told(fails=["mount"])
    disk = Disk(folder=tmp_path, shell=shell)
    assert disk.fill() is False
    with pytest.raises(UsageError, match="not permitted"):
        disk.free()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(UsageError, match="not permitted"):
        disk.up()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="root"):
        disk.up()


def test_the_list_says_that_it_needs_root():
    assert MENU["disk-full"].needs_root and MENU["link-cut"].needs_root and not MENU["rank-kill"].needs_root
