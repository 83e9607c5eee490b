"""Small captures of a run that stands still, in the forms that torch 2.13, py-spy 0.4 and the kernel print."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

#: Dumps of NCCL's recorder: sixteen ranks under Megatron; ranks 9 and 14 were given a GPU error (its
#: ``fault_injection.log``). None: not on this machine.
CAPTURED = next(
    (
        folder
        for parent in Path(__file__).parents
        if (folder := parent / "shared/data/oracles/flight_recorder/gpu_error_2nd").is_dir()
    ),
    None,
)

#: (name of the operation, its sizes): all of one group, in the order of their calls.
Call: TypeAlias = tuple[str, list[int]]


def gloo_dump(calls: Sequence[Call], *, done: int, group: str = "0", description: str = "default_pg") -> str:
    """A dump as gloo's groups make it: the first ``done`` calls have ended."""
    entries = [
        {
            "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "record_id": number - 1, "pg_id": 0,
            "process_group": [group, description], "profiling_name": f"gloo:{name}", "is_p2p": False,
            "input_sizes": [sizes], "output_sizes": [sizes], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
            "retired": number <= done, "state": "scheduled", "time_created_ns": 1000 + number,
            "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "timeout_ms": 1800000,
            "thread_id": "1", "thread_name": "python",
        }
        for number, (name, sizes) in enumerate(calls, 1)
    ]  # fmt: skip
    status = {"last_enqueued_collective": str(len(calls)), "last_completed_collective": str(done)}
    return json.dumps(
        {
            "version": "2.10", "comm_lib_version": "", "nccl_comm_state": {}, "entries": entries,
            "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
            "pg_status": {"0": {**status, "last_started_collective": "-1"}} if calls else {},
        }
    )  # fmt: skip


def nccl_dump(
    groups: Mapping[str, list[int]], waiting: Sequence[tuple[str, int, str]], ended: Mapping[str, int]
) -> str:
    """A dump as NCCL's watchdog makes it: only what has not ended.

    ``groups``: name -> ranks. ``waiting``: (group, number, operation; ``send 0->1`` for a send). ``ended``: group ->
    number of its last collective that ended.
    """
    keys = {name: str(index) for index, name in enumerate(sorted(groups, key=int))}
    entries = [
        {
            "pg_id": int(keys[group]), "process_group": [group, f"GROUP_{group}"], "profiling_name": f"nccl:{name}",
            "is_p2p": "<-" in name or "->" in name, "collective_seq_id": number, "p2p_seq_id": number,
            "input_sizes": [[8]], "output_sizes": [[8]], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
            "state": "scheduled", "retired": False, "time_created_ns": 1000 + number, "record_id": record,
        }
        for record, (group, number, name) in enumerate(waiting)
    ]  # fmt: skip
    posted = {group: max([n for name, n, _ in waiting if name == group], default=ended.get(group, 0)) for group in keys}
    return json.dumps(
        {
            "version": "2.9", "nccl_version": "2.27.3", "entries": entries,
            "pg_config": {
                name: {"name": name, "desc": f"GROUP_{name}", "ranks": str(ranks)} for name, ranks in groups.items()
            },
            "pg_status": {
                key: {"last_enqueued_collective": posted[name], "last_completed_collective": ended.get(name, 0)}
                for name, key in keys.items()
            },
        }
    )  # fmt: skip


def spy_dump(*threads: Sequence[tuple[str, str, int]], gil: bool = False, active: bool = False) -> str:
    """py-spy's JSON: frames (function, file, line) of the main thread first, the innermost first."""
    return json.dumps(
        [
            {
                "pid": 10, "thread_id": 100 + index, "thread_name": "MainThread" if index == 0 else f"thread-{index}",
                "os_thread_id": 10 + index, "active": active and index == 0, "owns_gil": gil and index == 0,
                "frames": [
                    {"name": name, "filename": file, "short_filename": file, "module": None, "line": line,
                     "locals": None, "is_entry": False, "is_shim_entry": False}
                    for name, file, line in frames
                ],
            }
            for index, frames in enumerate(threads)
        ]
    )  # fmt: skip


SITE = "/home/u/venv/lib/python3.11/site-packages"
IN_ALL_REDUCE = (
    ("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py", 3252),
    ("_exception_logger.<locals>.wrapper", f"{SITE}/torch/distributed/c10d_logger.py", 83),
    ("main", "/home/u/train.py", 17),
)
ASLEEP = (("step", "/home/u/train.py", 31), ("main", "/home/u/train.py", 18))
LOADING = (
    ("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py", 113),
    ("_MultiProcessingDataLoaderIter._next_data", f"{SITE}/torch/utils/data/dataloader.py", 1505),
    ("main", "/home/u/train.py", 22),
)

SPY_TEXT = """Process 31528: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 31528 (idle): "MainThread"
    step (train.py:31)
    <module> (train.py:18)
Thread 31633 (idle)
"""

FAULTHANDLER_TEXT = """Thread 0x00007f0a2b7fe640 [muster-link] (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f0a3c4a1740 [python] (most recent call first):
  File "/home/u/train.py", line 31 in step
  File "/home/u/train.py", line 18 in <module>
"""

RAS_TEXT = """NCCL version 2.24.3 compiled with CUDA 12.5
CUDA runtime version 12050, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4       7-8        32        32   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node host-3 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different AllReduce operation counts
  30 ranks have launched up to operation 6650
  Rank 7 has launched up to operation 6649 -- GPU 7 managed by process 483079 on node host-0

"""
