"""Before ranks are forked: what would make a fork unusable."""

import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import torch

from muster.rank import fork_check


def test_a_package_that_opened_cuda_at_its_import_is_named(monkeypatch):
    parent = os.getpid()
    monkeypatch.setattr(fork_check, "threads", list)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != parent)
    for name in fork_check.SUSPECTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert fork_check.why_not() == "a package opened CUDA while it was imported (flash_attn)"


def test_nothing_is_wrong_and_no_child_is_left():
    # A process of its own: another test may have asked torch for CUDA, after which a CUDA build's forks are bad.
    code = (
        "import os\nfrom muster.rank import fork_check\nassert fork_check.why_not() is None\n"
        "try: os.waitpid(-1, os.WNOHANG)\nexcept ChildProcessError: print('none left')"
    )
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # as the agent sets it: its pool would be threads
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environ
    )
    assert done.stdout == "none left\n", done.stderr


def test_a_thread_is_named_unless_it_stands_a_fork():
    release, threads = threading.Event(), []

    def named(name):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        release.wait()

    for name in ("jemalloc_bg_thd", "loader-7"):
        threads.append(threading.Thread(target=named, args=(name,)))
        threads[-1].start()
    try:
        while "loader-7" not in fork_check.threads():
            pass
        assert "jemalloc_bg_thd" not in fork_check.threads()
        assert "loader-7" in (fork_check.why_not() or "")
    finally:
        release.set()
        for each in threads:
            each.join()
