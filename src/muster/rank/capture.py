"""What this process does, told by a thread of its own while the main thread stands still."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

from muster.protocol.rank_agent import RankCaptured

#: Frames of a thread that are told, the innermost first.
MOST_FRAMES = 40


def captured() -> RankCaptured:
    """Stacks and flight recorder; about a millisecond. Code in C that keeps Python's lock keeps this from answering."""
    return RankCaptured(stacks="\n\n".join(_stacks()), recorder=_recorder())


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


def _recorder() -> str | None:
    """Never with stacks: to name their lines takes tens of seconds the first time. Only where torch is loaded."""
    distributed = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(distributed, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    found = dump(onlyActive=False)
    return found.decode() if isinstance(found, bytes) else str(found)
