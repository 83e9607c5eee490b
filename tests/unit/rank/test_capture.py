"""A rank tells what it does while its main thread stands still."""

import os
import subprocess
import sys

from fakes.hang_captures import gloo_dump, nccl_dump

from muster.core.typed_json import decode
from muster.health.hang import flight_recorder, stacks
from muster.protocol.rank_agent import RankCaptured
from muster.rank.capture import captured

#: A rank of the second of two replicas, in a process of its own: its default group and Muster's own beside it.
RANK = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from muster.core.typed_json import encode
from muster.rank.capture import captured
from muster.train.distributed.process_groups import gloo_group, named

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for attempt in (1, 2):
    for what in ("control", "checkpoint"):
        group = gloo_group(dist.HashStore(), rank=0, size=1, timeout=timedelta(seconds=20))
        group = named(group, attempt=attempt, what=what, ranks=range(4))
        for _ in range(attempt):
            group.allreduce([torch.ones(3)]).wait()
dist.all_reduce(torch.ones(2))
sys.stdout.write(encode(captured(2)).decode())
"""
#: A process whose main thread stands still while another one reads and a third tells what all do.
STANDS_STILL = """
import sys, threading
from muster.core.typed_json import encode
from muster.rank.capture import captured

def step(teller):
    teller.start()
    teller.join()

release, told = threading.Event(), []
waiter = threading.Thread(target=release.wait, name="reader", daemon=True)
waiter.start()
step(threading.Thread(target=lambda: told.append(captured(0))))
release.set()
waiter.join()
sys.stdout.write(encode(told[0]).decode())
"""


def test_stacks_of_all_threads_as_an_analyser_reads_them(tmp_path):
    """In a process of its own: pytest-xdist does not always run a test in the main thread."""
    program = tmp_path / "muster" / "stands_still.py"  # where a program lies in a clone of this repository
    program.parent.mkdir()
    program.write_text(STANDS_STILL)
    ran = subprocess.run([sys.executable, str(program)], capture_output=True, timeout=120, check=True)
    threads = stacks.parse(decode(RankCaptured, ran.stdout).stacks)
    assert {one.name for one in threads} == {"MainThread", "reader"}  # without the one that tells
    main = stacks.main_thread(threads)
    assert main is not None and main.user_line is not None
    assert (main.user_line.file, main.user_line.function) == (str(program), "step")


def test_the_recorder_is_torchs_own_dump():
    import torch.distributed

    told = captured(0)
    recorders = 2 if torch.distributed.is_nccl_available() else 1  # a CUDA build has NCCL's own beside gloo's
    assert [flight_recorder.parse(one).version[:2] for one in told.recorders] == ["2."] * recorders
    assert not told.problems


def test_groups_have_names_of_their_own_and_the_runs_ranks():
    """Real groups of gloo: without a name they are one group in the recorder, and its numbers collide."""
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "64"}
    ran = subprocess.run([sys.executable, "-c", RANK], capture_output=True, env=environment, timeout=120, check=True)
    told = decode(RankCaptured, ran.stdout)
    assert told.groups == {"0": (2,), "a2/control": (0, 1, 2, 3), "a2/checkpoint": (0, 1, 2, 3)}
    *_, text = told.recorders  # gloo's: a CUDA build tells NCCL's first
    recorder = flight_recorder.placed(flight_recorder.parse(text), told.groups)
    calls = [(recorder.groups[one.group].words, one.number) for one in recorder.operations]
    assert calls == [("control", 1), ("control", 2), ("checkpoint", 1), ("checkpoint", 2), ("default_pg", 1)]
    assert recorder.groups["0@2"].members == (2,)


def play(monkeypatch, name, dump):
    import torch._C._distributed_c10d as functions
    import torch.distributed  # noqa: F401

    monkeypatch.setattr(functions, name, dump, raising=False)


def test_a_build_with_nccl_tells_both_recorders_never_with_stacks(monkeypatch):
    nccl = nccl_dump({"0": [0, 1]}, [("0", 5, "all_reduce")], {"0": 4})
    play(monkeypatch, "_dump_nccl_trace_json", lambda *, onlyActive: nccl.encode())  # includeStackTraces: TypeError
    play(monkeypatch, "_dump_fr_trace_json", lambda *, onlyActive: gloo_dump([("barrier", [])], done=0).encode())
    told = captured(0)
    both = flight_recorder.merged([flight_recorder.parse(one) for one in told.recorders])
    assert [(one.backend, one.name, one.group) for one in both.unfinished] == [
        ("gloo", "barrier", "0+"), ("nccl", "all_reduce", "0")
    ]  # fmt: skip


def test_a_recorder_that_fails_is_named_and_costs_nothing_else(monkeypatch):
    def broken(*, onlyActive):
        raise RuntimeError("it != reset_epoch_start_idx_.end() INTERNAL ASSERT FAILED")

    play(monkeypatch, "_dump_nccl_trace_json", broken)
    told = captured(0)
    assert told.stacks and len(told.recorders) == 1
    assert told.problems == (
        "torch's _dump_nccl_trace_json failed: it != reset_epoch_start_idx_.end() INTERNAL ASSERT FAILED",
    )
