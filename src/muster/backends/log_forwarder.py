"""What a host's ranks write, copied to the pod's own output: one stream per pod then tells everything.

Ranks write files of the run's folder; the pod's output is what ``kubectl logs``, Cloud Logging and ``muster logs -f``
read. Each line bears its file's name: ``rank-3.a1 | ...``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from muster.storage import run_output

#: How a rank's own line begins, where something went wrong: of Python, of torch, of ours.
_SEVERE = (
    (re.compile(r"(\[rank\d+\]:? ?)?(Traceback \(most recent call last\)|error: |[\w.]+(Error|Exception)\b)"), "ERROR"),
    (re.compile(r"(\[rank\d+\]:? ?)?(\S+: )?(warning: |\w*Warning\b|W\d{4} )"), "WARNING"),
)
MARKED = re.compile(r"((?:rank-\d+\.a\d+)|(?:[a-z]+-host-[a-z0-9-]+)) \| ")
GATHER_S = 0.2
"""Writes within this time are copied together."""
LONGEST_BYTES = 16 * 1024
"""A line without end (a progress bar) is cut here, as container runtimes do."""
_CREATED, _WRITTEN = 0x100, 0x2  # IN_CREATE, IN_MODIFY of <sys/inotify.h>


def writer_of(line: str, pod: str) -> tuple[str, str]:
    """(task, text) of a line of the pod's output; the task is the process that wrote it, or the pod itself."""
    if line.startswith(run_output.JSON_BEGINS) and (parsed := run_output.of_json_line(line)) is not None:
        return parsed[0] or pod, parsed[1]
    result = MARKED.match(line)
    return (result[1], line[result.end() :]) if result else (pod, line)


def severity_of(text: str) -> str:
    """``ERROR``, ``WARNING`` or ``INFO``, by how the line begins."""
    return next((severity for pattern, severity in _SEVERE if pattern.match(text)), "INFO")


@dataclass(kw_only=True)
class LogForwarder:
    """Follows the log files that belong to ``host`` below ``run_dir``, in a thread, until ``stop``; as JSON lines where
    the run file asks for them (``output.json_logs``).

    The host's own events say which ranks are its own: on a claim other hosts write to the same folders.
    """

    run_dir: Path
    host: str
    writer: str = ""
    """Whose event files are the host's own; default: ``host``."""
    out: Callable[[bytes], object] = lambda data: os.write(1, data)
    _positions: dict[Path, int] = field(default_factory=dict)
    _rest: dict[Path, bytes] = field(default_factory=dict)
    _events: set[Path] = field(default_factory=set)
    _logs: set[Path] = field(default_factory=set)
    _thread: threading.Thread | None = None
    _wake: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._as_json_of = run_output.json_logs_of(self.run_dir)

    def start(self) -> None:
        """Start; without inotify, nothing is copied."""
        folders = [self.run_dir / "logs", self.run_dir / "events"]
        for folder in folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        inotify = _watching(folders)
        if inotify is None:
            return
        self._wake = os.pipe()
        self._thread = threading.Thread(target=self._follow, args=(inotify, self._wake[0]), daemon=True)
        # Signals are for the main thread: one that this thread caught would not wake it from waiting for its child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> None:
        """Copy the last output, and end."""
        if self._thread is None or self._wake is None:
            return
        os.write(self._wake[1], b"x")
        self._thread.join(5.0)
        self._thread = None

    def _follow(self, inotify: int, wake: int) -> None:
        over = False
        while not over:
            with contextlib.suppress(OSError):
                ready, _, _ = select.select([inotify, wake], [], [])
                if wake not in ready:
                    over = bool(select.select([wake], [], [], GATHER_S)[0])
                over = over or wake in ready
                if select.select([inotify], [], [], 0)[0]:
                    self.add_files(_names(os.read(inotify, 1 << 16)))
            self.copy()
        self.copy(last=True)
        os.close(inotify)

    def add_files(self, names: set[str]) -> None:
        """Files of this host among ``names``."""
        for name in names:
            if name.startswith(f"{self.writer or self.host}.") and name.endswith(".jsonl"):
                self._events.add(self.run_dir / "events" / name)
            elif name.endswith(f"-{self.host}.log"):
                self._logs.add(self.run_dir / "logs" / name)

    def copy(self, *, last: bool = False) -> None:
        """Write every whole new line of this host's files; with ``last``, half ones too."""
        for path in sorted(self._events):
            for line in self._new(path):
                if b'"rank.started"' in line:
                    with contextlib.suppress(ValueError, KeyError):
                        event = json.loads(line)
                        self._logs.add(self.run_dir / "logs" / f"rank-{event['rank']}.a{event['attempt']}.log")
        for path in sorted(self._logs):
            lines = self._new(path)
            if last and (half := self._rest.pop(path, b"")):
                lines.append(half)
            for line in lines:
                with contextlib.suppress(OSError):
                    self.out(self._marked(path.stem, line) + b"\n")

    def _marked(self, task: str, line: bytes) -> bytes:
        if not self._as_json_of:
            return f"{task} | ".encode() + line
        text = line.decode(errors="replace")
        return run_output.json_line(text, severity_of(text), run=self._as_json_of, task=task).encode()

    def _new(self, path: Path) -> list[bytes]:
        """Whole lines beyond what was read."""
        try:
            with open(path, "rb") as file:
                file.seek(self._positions.get(path, 0))
                data = file.read()
        except OSError:
            return []
        self._positions[path] = self._positions.get(path, 0) + len(data)
        *lines, rest = (self._rest.get(path, b"") + data).split(b"\n")
        if len(rest) > LONGEST_BYTES:
            lines, rest = [*lines, rest], b""
        self._rest[path] = rest
        return lines


def _watching(folders: list[Path]) -> int | None:
    """An inotify descriptor for files created and written in ``folders``; None where the kernel has none."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = int(libc.inotify_init1(os.O_CLOEXEC))
        if descriptor < 0:
            return None
        for folder in folders:
            if libc.inotify_add_watch(descriptor, os.fsencode(folder), _CREATED | _WRITTEN) < 0:
                os.close(descriptor)
                return None
    except (OSError, AttributeError):
        return None
    return descriptor


def _names(data: bytes) -> set[str]:
    """File names of ``struct inotify_event`` records: four 32-bit words, the last one the name's length."""
    result, at = set(), 0
    while at + 16 <= len(data):
        (size,) = struct.unpack_from("I", data, at + 12)
        result.add(os.fsdecode(data[at + 16 : at + 16 + size].rstrip(b"\0")))
        at += 16 + size
    return result
