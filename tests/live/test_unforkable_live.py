"""A package that starts a thread while it is imported: ranks are new processes, and all else is the same."""

import os

import psutil
import pytest
from chaos import Judged
from cluster import spec_of

pytestmark = pytest.mark.live

#: In a folder of PYTHONPATH: every interpreter imports it first.
PACKAGE = """
import sys, threading, time
if "muster.rank.fork_server" in sys.orig_argv:
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
"""


def test_ranks_are_new_processes_and_recover_to_the_same_bits(tmp_path, monkeypatch, reference):
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with Judged(tmp_path, spec_of()) as run:
        run.start()
        run.wait_for_step(10)
        assert all("--standby" in psutil.Process(pid).cmdline() for pid, _ in run.ranks().values())
        run.kill_rank(1)
        run.ended()
        assert run.recoveries() == ["restart"], run.story()
        assert run.final_hash() == reference(1, 2)[0]
        said = [event.detail["text"] for event in run.events("run.message")]
        assert any("ranks are new processes" in text and "imported packages run threads" in text for text in said)
