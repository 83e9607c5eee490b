"""A command in a run's allocation, in a step of its own, connected to a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator, Sequence

from muster.backends.protocols import Terminal
from muster.core.errors import BackendError


def execute(argv: Sequence[str], terminal: Terminal) -> int:
    """Run ``argv`` (an ``srun``) with the terminal's input and output; return the command's exit code.

    Raises:
        BackendError: there is no srun here.
    """
    try:
        return _on_a_terminal(argv, terminal) if terminal.tty else _over_pipes(argv, terminal)
    except FileNotFoundError as error:
        raise BackendError(f"no {argv[0]} on this machine", hint="run it on a login node of the cluster") from error


def _over_pipes(argv: Sequence[str], terminal: Terminal) -> int:
    given = subprocess.PIPE if terminal.typed is not None else subprocess.DEVNULL
    child = subprocess.Popen(list(argv), stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    readers = [
        _thread(_copy, _read(stream.fileno()), write)
        for stream, write in ((child.stdout, terminal.out), (child.stderr, terminal.err))
    ]
    if terminal.typed is not None and child.stdin is not None:
        _thread(_type_in, terminal.typed, child.stdin.fileno(), child.stdin.close)
    code = child.wait()
    for reader in readers:
        reader.join(5.0)
    return code


def _on_a_terminal(argv: Sequence[str], terminal: Terminal) -> int:
    """Through a pseudo-terminal, so that keys such as Ctrl-C go to the command."""
    ours, theirs = pty.openpty()
    if terminal.size is not None:
        columns, lines = terminal.size
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    child = subprocess.Popen([argv[0], "--pty", *argv[1:]], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    reader = _thread(_copy, _read(ours), terminal.out)
    if terminal.typed is not None:
        _thread(_type_in, terminal.typed, ours, lambda: None)
    code = child.wait()
    reader.join(2.0)
    with contextlib.suppress(OSError):
        os.close(ours)
    return code


def _thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _read(descriptor: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # reading a terminal whose other end is closed raises EIO
        while data := os.read(descriptor, 1 << 16):
            yield data


def _copy(pieces: Iterator[bytes], write: Callable[[bytes], object]) -> None:
    for piece in pieces:
        write(piece)


def _type_in(pieces: Iterator[bytes], descriptor: int, close: Callable[[], None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        for piece in pieces:
            while piece:
                piece = piece[os.write(descriptor, piece) :]
    with contextlib.suppress(OSError):
        close()
