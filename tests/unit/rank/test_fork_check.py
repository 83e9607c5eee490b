"""Before ranks are forked, one child looks whether it could use CUDA."""

import os
import subprocess
import sys
import types

import pytest
import torch

from muster.core.errors import BackendError
from muster.rank import fork_check


def test_a_package_that_opened_cuda_at_its_import_is_named(monkeypatch):
    parent = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != parent)
    for name in fork_check.SUSPECTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    with pytest.raises(BackendError, match=r"opened CUDA while it was imported \(flash_attn\)"):
        fork_check.check()


def test_nothing_is_wrong_and_no_child_is_left():
    # A process of its own: another test may have asked torch for CUDA, after which a CUDA build's forks are bad.
    code = (
        "import os\nfrom muster.rank import fork_check\nfork_check.check()\n"
        "try: os.waitpid(-1, os.WNOHANG)\nexcept ChildProcessError: print('none left')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "none left\n", done.stderr
