"""The entry point: runs one command, prints an error once, exits with its code.

Nothing heavy is imported up here: commands import what they need, so that ``muster --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from io import TextIOWrapper
from typing import Protocol, TextIO, runtime_checkable

import typer
import typer.core

from muster import __version__
from muster.app import api
from muster.cli import check as check_
from muster.cli import (
    cloud,
    drill,
    image,
    inspect_commands,
    plan,
    preflight,
    remove,
    render,
    run_commands,
    simulate,
    watch,
)

HELP = "Train language models on GPUs that come and go. Start: muster train RUN.yaml"

#: The commands of ``muster --help``, by what a person is doing.
GROUPS = {
    "Run": ("init", "train", "submit", "sweep", "stop", "recover", "restart", "down", "export", "track", "rm", "prune"),
    "Inspect": (
        "status", "watch", "logs", "events", "why", "check", "profile", "metrics", "report", "compare", "checkpoints",
        "exec",
    ),
    "Plan and rehearse": ("show", "data", "plan", "gpus", "calibrate", "prices", "simulate", "drill"),
    "Clusters": ("up", "preflight", "image", "render", "accept"),
    "Other": ("version",),
}  # fmt: skip


class _Formatter(Protocol):
    """Of the parser, which lies in click or in typer, by their versions."""

    def section(self, name: str) -> AbstractContextManager[None]: ...

    def write_dl(self, rows: list[tuple[str, str]]) -> None: ...


@runtime_checkable
class _ParserError(Protocol):
    def format_message(self) -> str: ...


class _Grouped(typer.core.TyperGroup):
    """Lists the commands by group, each sentence whole."""

    def format_commands(self, ctx: object, formatter: _Formatter) -> None:
        width = max(len(name) for name in self.commands)
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{name:<{width}}", self.commands[name].get_short_help_str(limit=200)) for name in names]
                )


app = typer.Typer(
    name="muster",
    cls=_Grouped,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (
    plan.init,
    run_commands.train, run_commands.submit, run_commands.recover, run_commands.restart, run_commands.stop,
    run_commands.down, run_commands.export, run_commands.track, run_commands.sweep,
    inspect_commands.status, inspect_commands.logs, inspect_commands.events, inspect_commands.profile,
    inspect_commands.metrics, inspect_commands.report, inspect_commands.compare,
    inspect_commands.checkpoints, inspect_commands.show, inspect_commands.data, inspect_commands.why, check_.check,
    drill.drill, watch.watch, plan.plan, plan.gpus, plan.calibrate, simulate.simulate, cloud.up, image.image,
    preflight.preflight, preflight.accept, render.render, remove.rm, remove.prune,
):  # fmt: skip
    app.command()(command)
app.command(name="exec", context_settings={"ignore_unknown_options": True})(run_commands.exec_)
app.add_typer(plan.prices_app, name="prices")


def _version(requested: bool) -> None:
    if requested:
        print(f"muster {__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    pass


@app.command()
def version() -> None:
    """Print the version."""
    print(f"muster {__version__}")


def main() -> None:
    """Run ``sys.argv`` and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without UTF-8 ends no command
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the reader is gone, or the disk is full: the exit code is kept
            _discard(stream)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command line; return the exit code. Every error has been printed."""
    from muster.cli import output

    try:
        result: object = typer.main.get_command(app)(args=list(argv), prog_name="muster", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except api.MusterError as error:
        output.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        output.info("stopped")
        return 130
    except BrokenPipeError:  # `muster events | head`
        _discard(sys.stdout)
        return 141
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except Exception as error:  # noqa: BLE001 (the process's edge: one line, the rest in a file)
        return _usage_error(error) if isinstance(error, _ParserError) else _unexpected(error)


def _usage_error(error: _ParserError) -> int:
    """The command line cannot be parsed."""
    from muster.cli import output

    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "muster")
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        output.info(message)
    elif message:  # none: the help was printed, for want of a command
        output.info(f"error: {message}")
        output.info(f"hint: {command} --help")
    return 2


def _unexpected(error: Exception) -> int:
    """A bug of ours, or an abort at a prompt: print one line, and write the traceback to a file."""
    import tempfile
    import traceback

    from muster.cli import output

    if type(error).__name__ == "Abort":
        output.info("stopped")
        return 130
    with tempfile.NamedTemporaryFile("w", prefix="muster-crash-", suffix=".txt", delete=False) as file:
        file.write(api.redact("".join(traceback.format_exception(error))))
    first = (str(error).splitlines() or [""])[0]
    output.info(api.redact(f"error: unexpected {type(error).__name__}: {first}"))
    output.info(f"hint: this is a bug in Muster; the traceback is in {file.name}")
    return 1


def _discard(stream: TextIO) -> None:
    """The reader has closed the pipe; what is still buffered must not raise at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
