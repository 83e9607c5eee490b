"""A tracker that fails is left out and named once; the training goes on."""

import errno
import os

import pytest

from muster.train.measurement import trackers


class Failing:
    name = "wandb"

    def __init__(self):
        self.calls = 0

    def log(self, values, *, step):
        self.calls += 1
        if step > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        self.calls += 1


def test_it_gets_no_more_numbers_and_somebody_hears_why():
    said, inner = [], Failing()
    found = trackers.Trackers([inner], said.append)
    for step in range(1, 6):
        found.log({"train/loss": 1.0}, step=step)
    found.close()
    assert inner.calls == 3
    assert said == ["wandb failed and gets no more numbers: [Errno 28] No space left on device"]


def test_one_that_works_is_closed():
    said, inner = [], Failing()
    found = trackers.Trackers([inner], said.append)
    found.log({"train/loss": 1.0}, step=1)
    found.close()
    assert inner.calls == 2 and not said


def test_tensorboard_on_a_full_disk(tmp_path):
    """Its files are made with the first numbers, so that not even a restart needs the disk."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    (tmp_path / "tensorboard").write_text("a file in the way: nothing can be written below it")
    said = []
    found = trackers.Trackers([trackers.TensorBoard(tmp_path / "tensorboard")], said.append)
    for step in (1, 2):
        found.log({"train/loss": 1.0}, step=step)
    found.close()
    assert len(said) == 1 and said[0].startswith("TensorBoard failed and gets no more numbers")
