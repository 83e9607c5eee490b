"""What this process does, reported by a separate thread while the main thread hangs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType

from muster.protocol.rank_agent import RankCaptured

#: Most frames reported for a thread, the innermost first.
MOST_FRAMES = 40


def captured(rank: int, *, recorders: bool = True) -> RankCaptured:
    """Stacks and flight recorders of the run's ``rank``; about a millisecond.

    Code in C that keeps Python's lock keeps this from answering.
    """
    problems: list[str] = []
    return RankCaptured(
        stacks="\n\n".join(_stacks()),
        recorders=tuple(_recorders(problems)) if recorders else (),
        groups=_groups(rank) if recorders else {},
        problems=tuple(problems),
    )


def _stacks() -> Iterator[str]:
    frames = sys._current_frames()
    main, own = threading.main_thread(), threading.get_ident()
    threads = [thread for thread in threading.enumerate() if thread is not main and thread.ident != own]
    for thread in (*threads, main):
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            head = f"Thread 0x{thread.ident or 0:016x} [{thread.name}] (most recent call first):"
            yield "\n".join([head, *_lines(frame)])


def _lines(frame: FrameType | None) -> Iterator[str]:
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_qualname}'
        frame = frame.f_back


def _recorders(problems: list[str]) -> Iterator[str]:
    """Only where torch is loaded, and never with stacks: to name their lines takes tens of seconds the first time.

    A build of torch with NCCL records NCCL's operations apart from those of gloo.
    """
    distributed = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(distributed, name, None)
        if dump is None:
            continue
        try:
            found = dump(onlyActive=False)
        except (RuntimeError, TypeError) as error:
            problems.append(f"torch's {name} failed: {str(error)[:200]}")
        else:
            yield found.decode(errors="replace") if isinstance(found, bytes) else str(found)


def _groups(rank: int) -> Mapping[str, tuple[int, ...]]:
    """Ranks of the run, in each group's order. Where the default group spans one replica, torch counts within that."""
    torch_groups = sys.modules.get("torch.distributed.distributed_c10d")
    own_groups = sys.modules.get("muster.train.distributed.process_groups")
    found = dict[str, tuple[int, ...]](getattr(own_groups, "ranks_of_groups", {}))
    try:
        world = getattr(torch_groups, "_world", None)
        default = getattr(world, "default_pg", None)
        if world is None or default is None:
            return found
        first = max(0, rank - default.rank())
        for group, ranks in list(world.pg_group_ranks.items()):
            found[str(world.pg_names[group])] = tuple(first + int(one) for one in sorted(ranks, key=ranks.get))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        pass  # the main thread ends its groups at this moment, or torch keeps them otherwise: the recorders say less
    return found
