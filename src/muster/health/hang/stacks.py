"""Stacks of a rank's threads: as ``py-spy dump`` (text or JSON) and Python's ``faulthandler`` print them.

A file that is cut yields the threads that came before the cut.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from muster.core.typed_json import Json, Record, Unreadable, child, children, text, whole

#: Where a thread waits for other ranks: files of torch, of Muster's own sums over ranks, and of its network test.
_COLLECTIVE = re.compile(
    r"(^|/)(torch/distributed/(distributed_c10d|_functional_collectives|_symmetric_memory)\w*\.py"
    r"|muster/train/distributed/\w+\.py|muster/probe/collective_group\.py)$"
)
#: Where it waits for data: loaders of torch and of Muster.
_LOADER = re.compile(r"(^|/)(torch/utils/data/.*|muster/train/data_feed/.*|muster/data/.*)\.py$")
#: Frames of libraries: a reader needs the line of the program that called them.
_LIBRARY = re.compile(r"^<|(^|/)(site-packages|dist-packages|lib/python3\.\d+|torch)/")
#: What is in Muster's package: a program of the user's may lie in a folder `muster` (a clone of the repository) too.
_OURS = frozenset(path.stem for path in Path(__file__).parents[2].iterdir())

_SPY_THREAD = re.compile(r'^Thread (?:0x)?(\w+) \(([\w+ ]+)\)(?:: "(.*)")?$')
_SPY_FRAME = re.compile(r"^ {4,}(.+) \((.+?)(?::(\d{1,9}))?\)$")
_FAULT_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FAULT_FRAME = re.compile(r'^  File "(.+)", line (\d{1,9}|\?\?\?)(?: in (.+))?$')


@dataclass(frozen=True, kw_only=True)
class Frame(Record):
    function: str
    file: str
    line: int = 0

    @property
    def place(self) -> str:
        """``file:line``; of an installed package from its own name on."""
        file = self.file.rpartition("/site-packages/")[2]
        return f"{file}:{self.line}" if self.line else file


@dataclass(frozen=True, kw_only=True)
class Thread(Record):
    """``frames``: the innermost first."""

    name: str = ""
    frames: tuple[Frame, ...] = ()
    main: bool = False
    active: bool | None = None
    """On a processor at that moment; None: the tool does not say."""
    owns_gil: bool | None = None
    """Holds Python's lock; None: the tool does not say."""

    @property
    def in_collective(self) -> bool:
        """It waits for other ranks, as far as Python's frames show."""
        return any(_COLLECTIVE.search(frame.file) for frame in self.frames)

    @property
    def in_loader(self) -> bool:
        """It waits for data."""
        return any(_LOADER.search(frame.file) for frame in self.frames)

    @property
    def user_line(self) -> Frame | None:
        """The innermost frame of the user's program; None: all are libraries'."""
        return next((frame for frame in self.frames if not _is_library(frame.file)), None)

    @property
    def blocked_in_c(self) -> bool:
        """It holds Python's lock and does not run: code in C that sleeps or waits with the lock held."""
        return self.owns_gil is True and self.active is False


def _is_library(file: str) -> bool:
    _, ours, inside = f"/{file}".rpartition("/muster/")
    return _LIBRARY.search(file) is not None or bool(ours and inside.split("/")[0].removesuffix(".py") in _OURS)


def main_thread(threads: tuple[Thread, ...]) -> Thread | None:
    """The one that runs the program; the first with frames where no tool says which it is."""
    return next((one for one in threads if one.main), next((one for one in threads if one.frames), None))


def parse(captured: str) -> tuple[Thread, ...]:
    """The threads in it.

    Raises:
        Unreadable: none of the three forms, or nothing whole is in it.
    """
    if captured.lstrip()[:1] in ("[", "{"):
        threads = _of_json(captured)
    else:
        threads = _of_text(captured.splitlines())
    if not threads:
        raise Unreadable("no stack in it: expected py-spy's or faulthandler's output")
    return threads


def _of_json(captured: str) -> tuple[Thread, ...]:
    try:
        rows: Json = json.loads(captured)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"py-spy's JSON is cut or damaged: {error}") from None
    try:
        return tuple(_thread(row) for row in children({"threads": rows}, "threads") if "frames" in row)
    except ValueError as error:
        raise Unreadable(f"py-spy's JSON: {error}") from None


def _thread(row: Json) -> Thread:
    own = child(row)
    name = text(own, "thread_name")
    return Thread(
        name=name,
        main=name == "MainThread" or ("os_thread_id" in own and own["os_thread_id"] == own.get("pid")),
        active=own.get("active") is True,
        owns_gil=own.get("owns_gil") is True,
        frames=tuple(
            Frame(function=text(frame, "name"), file=text(frame, "filename"), line=whole(frame, "line"))
            for frame in children(own, "frames")
        ),
    )


def _of_text(lines: list[str]) -> tuple[Thread, ...]:
    threads: list[Thread] = []
    frames: list[Frame] = []
    current: Thread | None = None

    def finish() -> None:
        if current is not None:
            threads.append(
                Thread(
                    name=current.name,
                    main=current.main,
                    active=current.active,
                    owns_gil=current.owns_gil,
                    frames=tuple(frames),
                )
            )
        frames.clear()

    for line in lines:
        if begun := _thread_line(line):
            finish()
            current = begun
        elif current is not None and (frame := _frame_line(line)):
            frames.append(frame)
    finish()
    if len(threads) > 1 and not any(one.main for one in threads) and threads[0].owns_gil is None:
        last = threads.pop()  # faulthandler prints the newest thread first, so the main one last
        threads.append(Thread(name=last.name, frames=last.frames, main=True))
    return tuple(threads)


def _thread_line(line: str) -> Thread | None:
    if found := _SPY_THREAD.match(line):
        name = found[3] or ""
        words = found[2].split("+")
        return Thread(name=name, main=name == "MainThread", active="active" in words, owns_gil="gil" in words)
    if found := _FAULT_THREAD.match(line):
        return Thread(name=found[3] or "")
    return None


def _frame_line(line: str) -> Frame | None:
    if found := _SPY_FRAME.match(line):
        return Frame(function=found[1], file=found[2], line=int(found[3] or 0))
    if found := _FAULT_FRAME.match(line):
        return Frame(function=found[3] or "?", file=found[1], line=int(found[2]) if found[2].isdigit() else 0)
    return None
