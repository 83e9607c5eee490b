"""``muster exec RUN [--host N] -- CMD``: a command, or a shell, on a host of a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import typer

from muster.app import api
from muster.cli.run_commands import RUN

COMMAND = typer.Argument(None, metavar="-- CMD [ARG]...", help="The command and its arguments; default: bash.")
HOST = typer.Option(None, "--host", help="Number of the host; default: the first.", min=0)


def exec_(run: str = RUN, command: list[str] = COMMAND, host: int | None = HOST) -> None:
    """Run a command, or a shell, on a host of the run.

    Exits with the command's exit code.
    """
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    piped = not sys.stdin.isatty() and not sys.stdin.closed
    terminal = api.Terminal(
        out=_writer(1),
        err=_writer(2),
        typed=_typed() if tty or piped else None,
        tty=tty,
        size=(os.get_terminal_size().columns, os.get_terminal_size().lines) if tty else None,
    )
    with _raw() if tty else contextlib.nullcontext():
        code = api.execute(run, command or ["bash"], terminal, host=host)
    if code:
        raise typer.Exit(code)


def _writer(descriptor: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    return write


def _typed() -> Iterator[bytes]:
    while data := os.read(0, 4096):
        yield data


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Send every key to the other side, Ctrl-C included; restore the terminal afterwards."""
    import termios
    import tty

    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
