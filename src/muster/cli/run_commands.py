"""Commands that start, change or end a run: train, submit, recover, restart, stop, down, track, export."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from muster.app import api
from muster.app.completion import key_paths, run_ids
from muster.cli import output

if TYPE_CHECKING:
    from muster.app.run.submit import Submitted
    from muster.app.run.train import Ended


RUN_FILE = typer.Argument(..., metavar="RUN.yaml", help="The run file.")
OVERRIDES = typer.Argument(
    None, metavar="[KEY.PATH=VALUE]...", help="Values that replace the file's.", autocompletion=key_paths
)
OUT = typer.Option(None, "--out", "-o", help="Folder to write; default: exports in the run's folder.")
RUN = typer.Argument(..., metavar="RUN", help="Id (or its beginning), folder, or `last`.", autocompletion=run_ids)
RANKS = typer.Option(
    None, "--ranks", metavar="0,3|all", help="Ranks whose output is shown; default: rank 0's of a `command`."
)

OVER = typer.Option(
    [], "--over", metavar="KEY=VALUES", help="LOW..HIGH, LOW..HIGH:log, LOW..HIGH:STEP or A,B,C; may be repeated."
)
COMMAND = typer.Argument(None, metavar="-- CMD [ARG]...", help="The command and its arguments; default: bash.")
HOST = typer.Option(None, "--host", help="Number of the host; default: the first.", min=0)


def train(run_file: str = RUN_FILE, overrides: list[str] = OVERRIDES, ranks: str | None = RANKS) -> None:
    """Train on this machine and watch. Ctrl-C saves and ends the run; a second Ctrl-C ends it at once.

    A closed terminal ends nothing: muster stop does.
    """
    from muster.cli.live import display_of

    loaded = _load(run_file, overrides)
    display = display_of(loaded.spec, ranks)
    _leave(
        api.train(loaded, argv=["muster", *sys.argv[1:]], on_start=display.started, sinks=[display], tell=output.info)
    )


def submit(
    run_file: str = RUN_FILE,
    overrides: list[str] = OVERRIDES,
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be sent; change nothing."),
    backend: str | None = typer.Option(None, "--backend", help="Instead of the file's."),
    places: str | None = typer.Option(
        None, "--backends", metavar="A,B", help="Ask in the plan's order, the cheapest first: gke,vertex,gce."
    ),
    wait: float | None = typer.Option(
        None, "--wait", min=0.0, metavar="HOURS", help="With --backends: for hosts, then ask the next place."
    ),
) -> None:
    """Start a run in the background and print its id. The terminal may be closed."""
    from muster.app.run import submit as use_case

    if places is not None and (dry_run or backend):
        raise api.UsageError("--backends asks several places: give it without --backend and --dry-run")
    if wait is not None and places is None:
        raise api.UsageError("--wait is for --backends", hint="muster submit RUN.yaml --backends gke,vertex --wait 2")
    if places is not None:
        from muster.app.submit_places import submit_to_first

        patience_s = None if wait is None else wait * 3600
        argv, tell = ["muster", *sys.argv[1:]], output.info
        _submitted(
            submit_to_first(
                run_file, overrides or [], names=names_in(places), patience_s=patience_s, argv=argv, tell=tell
            )
        )
        return
    loaded = _load(run_file, [*(overrides or []), *([f"backend={backend}"] if backend else [])])
    if dry_run:
        from dataclasses import asdict

        output.as_json(asdict(use_case.preview(loaded)))
        return
    _submitted(use_case.submit(loaded, argv=["muster", *sys.argv[1:]], tell=output.info))


def names_in(text: str) -> list[str]:
    """Of ``gke, vertex,gce``."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _submitted(result: Submitted) -> None:
    output.result(result.run.run_id)
    if result.again:
        output.info("it is already running; nothing was started")
    output.doubts(result.handle.warnings)
    output.info(f"in {result.run.path}")
    output.info(
        f"hint: muster status {result.run.run_id}, muster logs -f {result.run.run_id}, muster stop {result.run.run_id}"
    )


def sweep(
    run_file: str = RUN_FILE,
    overrides: list[str] = OVERRIDES,
    over: list[str] = OVER,
    trials: int = typer.Option(..., "--trials", min=1, max=1000, help="How many in all."),
    parallel: int = typer.Option(1, "--parallel", min=1, max=256, help="How many run at a time."),
    sampler: str = typer.Option("tpe", "--sampler", help="How values are chosen: tpe, random or grid."),
    pruner: str = typer.Option(
        "median", "--pruner", help="What ends bad trials early, by held-out loss: median, halving, hyperband or none."
    ),
    seed: int = typer.Option(0, "--seed", help="Of the sampler."),
    json: bool = typer.Option(False, "--json", help="Print the trials as JSON at the end."),
) -> None:
    """Find good values of a few keys: many runs of one run file. Ctrl-C stops them; the same command goes on.

    `limits` hold for all trials together.
    """
    from muster.app.inspect.sweeps import view
    from muster.app.sweep import ranges
    from muster.app.sweep.definition import define
    from muster.app.sweep.sweep import sweep as use_case
    from muster.cli import tables

    definition = define(
        run_file, overrides or [], over, trials=trials, parallel=parallel, sampler=sampler, pruner=pruner, seed=seed
    )
    output.warnings(definition.loaded.warnings)
    for note in definition.notes:
        output.info(note)
    output.info(f"in {definition.folder}")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal ends no run, and no sweep
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = use_case(definition, tell=output.info)
    except KeyboardInterrupt:
        output.info("stopped: each trial was saved; the same command goes on with them")
        raise typer.Exit(130) from None
    found = view(result.folder, result.record)
    if json:
        output.as_json(found.to_json())
    for line in () if json else tables.sweep_trials(found, output.width()):
        output.result(line)
    output.info(f"{definition.name}: {result.reason}")
    if found.best is not None:
        best = found.best.trial
        output.info(f"best: {' '.join(ranges.override(key, value) for key, value in best.values.items())}")
        output.info(f"hint: muster compare {definition.name}; muster export {best.run_id}")
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def recover(
    run: str = RUN,
    overrides: list[str] = OVERRIDES,
    watch: bool = typer.Option(False, "--watch", "-w", help="Supervise from this terminal, as `train` does."),
    copy_on: str | None = typer.Option(
        None, "--from", metavar="HOST", help="The run's home was lost: continue from HOST's copy (backend: ssh)."
    ),
    ranks: str | None = RANKS,
) -> None:
    """Continue a run that was stopped or whose supervisor died.

    Agents that still run are adopted.
    """
    from muster.app.run import recover as use_case

    argv = ["muster", *sys.argv[1:]]
    if not watch:
        result = use_case.recover(run, overrides or [], argv=argv, copy_on=copy_on)
        output.result(result.run.run_id)
        output.doubts(result.handle.warnings)
        output.info(f"hint: muster logs -f {result.run.run_id}")
        return
    from muster.app.inspect.status import spec_of
    from muster.cli.live import display_of

    display = display_of(spec_of(api.find_run(run)), ranks)
    _leave(use_case.recover_here(run, overrides or [], argv=argv, on_start=display.started, sinks=[display]))


def restart(run: str = RUN, overrides: list[str] = OVERRIDES) -> None:
    """Start a failed run again, corrected, on its held hosts.

    They are held for recovery.keep_hosts_after_failure_s.
    """
    run_id = api.restart(run, overrides or []).run_id
    output.result(run_id)
    output.info(f"hint: muster watch {run_id}, muster logs -f {run_id}")


def stop(
    run: str = RUN,
    force: bool = typer.Option(False, "--force", help="End at once; the newest checkpoint remains."),
    wait: bool = typer.Option(True, "--wait/--no-wait", help="Return when the run has ended."),
) -> None:
    """Save a checkpoint and end the run."""
    result = api.stop(run, force=force, wait=wait)
    if not result.was_running:
        output.info(f"{result.run.run_id} had already ended: {result.status.state} ({result.status.reason})")
    elif result.again:
        output.info(f"{result.run.run_id} has ended, and was started again meanwhile: it is {result.status.state}")
        output.info(f"hint: muster stop {result.run.run_id} again ends that, too")
    elif wait:
        output.info(f"{result.run.run_id}: {result.status.state}: {result.status.reason}")
        output.info(f"hint: muster recover {result.run.run_id} continues from here")
    else:
        output.info(f"{result.run.run_id} was asked to stop")


def down(
    run: str = RUN,
    overrides: list[str] = OVERRIDES,
    zone: str | None = typer.Option(None, "--zone", help="With a run file: the zone, if the file names several."),
    keep_data: bool = typer.Option(False, "--keep-data", help="With a run file: keep its buckets."),
    as_json: bool = typer.Option(
        False, "--json", help="What is left, as JSON; with a run file, with its cost per day."
    ),
) -> None:
    """End everything of a run now and verify that nothing is left.

    With a run file: remove the cluster that `muster up` created.
    """
    if run.endswith((".yaml", ".yml")):
        from muster.cli.cloud import give_back

        give_back(run, overrides, zone, keep_data, as_json)
        return
    if extra := [*(overrides or []), *(["--zone"] if zone else []), *(["--keep-data"] if keep_data else [])]:
        raise api.UsageError(
            f"muster down ends one run at a time: {extra[0]!r} needs a run file",
            hint=f"muster down {run}, then the next one",
        )
    result = api.down(run)
    if as_json:
        output.as_json(result.to_json())
        return
    output.info(f"{result.run.run_id} is down: no processes or memory are left; ${result.usd_per_hour:.2f}/h stopped")
    output.info(f"its folder is kept: {result.run.path}")


def track(run: str = RUN) -> None:
    """Send the figures that an ended run's trackers lack. While a run trains it does so itself."""
    from muster.app import track as use_case

    output.info(f"the trackers have all figures of {use_case.track(run, tell=output.info).run_id}")


def export(
    run: str = RUN,
    out: Path | None = OUT,
    step: int | None = typer.Option(None, "--step", help="Checkpoint of this step; default: the newest."),
    best: bool = typer.Option(False, "--best", help="The checkpoint with the lowest held-out loss."),
    adapter: bool = typer.Option(False, "--adapter", help="LoRA: write the adapter alone instead of merging it."),
    no_verify: bool = typer.Option(False, "--no-verify", help="Do not reload and compare what was written."),
    base: str | None = typer.Option(None, "--base", metavar="ORG/NAME", help="With --adapter: its base on the hub."),
    push: str | None = typer.Option(None, "--push", metavar="OWNER/NAME", help="Repository of the Hugging Face hub."),
    public: bool = typer.Option(False, "--public", help="With --push: where it is made, everybody can read it."),
    place: str | None = typer.Option(None, "--for", metavar="vertex|gke", help="Write what serves it there, too."),
    bucket: str | None = typer.Option(None, "--bucket", help="With --for: gs://BUCKET that the folder is copied to."),
    machine: str | None = typer.Option(None, "--machine", help="With --for; default: the cheapest that holds it."),
    image: str | None = typer.Option(None, "--image", help="With --for: a container image of vLLM."),
) -> None:
    """Write a Hugging Face folder, then reload and compare it; with --push, put it on the hub with a model card."""
    from muster.app.inspect.status import spec_of
    from muster.handoff import serve

    target = None
    if place is not None:
        if push is not None and out is None:
            raise api.UsageError("--for needs a folder that is kept", hint="--out FOLDER together with --push")
        target = serve.target(place, spec_of(api.find_run(run)), bucket=bucket, image=image, machine=machine)
    result = api.export(
        run, out=out, step=step, best=best, merge=not adapter, push=push, public=public, base=base,
        verify=not no_verify,
    )  # fmt: skip
    output.result(result.url or str(result.folder))
    for line in result.lines:
        output.info(line)
    if target is not None:
        served = serve.serve(target, spec_of(api.find_run(run)).name, result.folder)
        for line in (*served.notes, "never run on Google Cloud; nothing was sent. To serve it:", *served.steps):
            output.info(line)


def _load(run_file: str, overrides: list[str] | None) -> api.Loaded:
    if run_file.endswith(".json"):  # what `muster plan --out` wrote
        from muster.app.planning.plan import open_plan

        loaded = open_plan(run_file, overrides or [])
    else:
        loaded = api.load(run_file, overrides or [])
    output.warnings(loaded.warnings)
    return loaded


def _leave(ended: Ended) -> None:
    """Exit with the run's code, even if the terminal is gone."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if not ended.shown:
        from muster.cli.live import show_cursor

        show_cursor()
        os._exit(ended.exit_code)
    if ended.exit_code:
        raise typer.Exit(ended.exit_code)


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
