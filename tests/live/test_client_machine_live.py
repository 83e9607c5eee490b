"""Verbs of a machine that submits, looks and reports, on one without /proc, /dev/shm and what Linux alone gives Python.

It stands for a Mac, on which nothing was ever run."""

import os
import subprocess
import sys

import pytest

from muster.app.run import submit
from muster.config.load import load

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

RUN_FILE = """\
name: far
model:
  config:
    {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, intermediate_size: 64,
     vocab_size: 256}
data: {sources: [{type: random, rows: 64}]}
training: {steps: 10, sequence_length: 64}
resources: {device: cpu, ranks_per_host: 1, usd_per_host_hour: 1}
"""
LINUX_ALONE = """\
import os, select, signal, socket
for module, names in (
    (os, "pidfd_open sched_getaffinity sched_setaffinity memfd_create eventfd posix_fadvise posix_fallocate splice "
         "copy_file_range getrandom setns unshare O_TMPFILE O_DIRECT"),
    (select, "epoll"), (signal, "pidfd_send_signal"), (socket, "SO_PEERCRED"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
from muster.cli.main import main
main()
"""
HIDDEN = """\
mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 && mount -t tmpfs none /proc || exit 99
[ ! -e /dev/shm ] && [ ! -e /proc/self ] || exit 99
exec "$@"
"""
VERBS = (
    ("show", "run.yaml"), ("plan", "run.yaml"), ("gpus",), ("prices", "list"), ("status",), ("status", "last"),
    ("events", "last"), ("report", "last"), ("checkpoints", "last"), ("logs", "last"), ("stop", "last"),
    ("down", "last"),
    ("render", "run.yaml", "backend=slurm"), ("rm", "last", "--yes"),
)  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of mounts needs root")
def test_client_verbs_need_neither_proc_nor_shared_memory_nor_linux(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    intent = submit.begin(load("run.yaml"))
    submit.log_event(intent.run, "run.finished", {"outcome": "stopped", "exit_code": 130, "reason": "by hand"})
    (tmp_path / "hide.py").write_text(LINUX_ALONE)
    wrong = []
    for words in VERBS:
        argv = [
            "unshare",
            "-m",
            "bash",
            "-c",
            HIDDEN,
            "hidden",
            sys.executable,
            "-P",
            str(tmp_path / "hide.py"),
            *words,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 99:
            pytest.skip("mounts cannot be hidden here")
        if done.returncode or "Traceback" in done.stderr:
            wrong.append((words, done.returncode, done.stdout[-500:] + done.stderr[-500:]))
    assert not wrong
