"""The first hour on a GPU: eighteen commands in eight bundles, each bundle within ten minutes, without a network.

    python benchmarks/first_gpu_hour.py --pack WHEELS [--python 3.12]   # with a network: brings what an image lacks
    python benchmarks/first_gpu_hour.py --bundle A --out OUT --wheels WHEELS   # on one H100 or H200; then B to H
    python benchmarks/first_gpu_hour.py --list
    python benchmarks/first_gpu_hour.py --smoke --out OUT [--only varlen ...]  # tiny, on the CPU: does it run?

A and B decide whether the rest is worth starting. Each command is a process with a time limit of its own; one that
fails, or is ended at its limit, costs nothing but itself. OUT/hour.json is written after each one (figures, claims, how
it ended), and the output of each is in OUT/NN-NAME.log; another bundle adds to the same file. Every result is said as
what it proves, refutes or leaves open. Needs torch of the image and what WHEELS brings. One H100's: RESULTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from gpu_hour.finding import Findings, line  # noqa: E402
from gpu_hour.wheels import install, pack  # noqa: E402

#: Ten minutes at most, the installation of wheels included.
BUNDLE_S = 570


@dataclass(frozen=True)
class Command:
    """``program``: a benchmark with its arguments; none: the probe of this name."""

    name: str
    bundle: str
    limit_s: int
    about: str
    program: tuple[str, ...] = ()
    smoke: tuple[str, ...] = ()


ONE_B = ("trainer_gpu.py", "--only", "1b", "--micro", "8", "4", "--systems", "muster", "muster_compiled")
COMMANDS = (
    Command("machine", "A", 60, "versions, limits, what torch's own attention takes"),
    Command("fork", "A", 150, "a fork beside flash-attn: clean with NVML's answer, poisoned without"),
    Command("nccl", "A", 120, "NCCL with one rank: sums, bytes of a communicator, abort"),
    Command("varlen", "B", 120, "attention over packed documents is right, and bit for bit"),
    Command("padding", "B", 150, "what empty documents cost"),
    Command("loss", "B", 200, "the chunked loss: eager, compiled, larger chunks"),
    Command("whole", "C", 260, "the whole stack, twice, to one state"),
    Command("exact", "C", 300, "fixed-point sums on one GPU"),
    Command(
        "trainer-1b", "D", 330, "tokens/s and MFU of 1B beside a bare loop",
        (*ONE_B, "bare_compiled", "bare"), ("--only", "1b", "--systems", "muster", "bare"),
    ),
    Command(
        "trainer-8b-lora", "D", 240, "MFU of 8B LoRA, to compare with 40.7 % (Automodel, one H100)",
        ("trainer_gpu.py", "--only", "8b-lora", "--micro", "2", "--systems", "muster_compiled", "bare_compiled"),
        ("--only", "8b-lora", "--systems", "muster"),
    ),
    Command("trace", "E", 200, "gaps, copies and waits of a compiled step"),
    Command("trace_8b_lora", "E", 150, "the same of 8B LoRA: what attention and matrices take"),
    Command("memory", "E", 180, "the plan's bytes beside the driver's"),
    Command(
        "recovery", "F", 380, "seconds by stage after a kill, a device assert, out of memory",
        ("recovery_gpu.py", "--shape", "300m", "--trials", "3", "--settle-s", "8", "--only",
         "rank_kill", "device_assert", "out_of_memory"), ("--only", "rank_kill"),
    ),
    Command(
        "recovery-imports", "F", 180, "what a standby's context is worth",
        ("recovery_gpu.py", "--shape", "300m", "--trials", "2", "--settle-s", "8", "--only", "rank_kill_imports"),
        ("--only", "rank_kill_imports"),
    ),
    Command(
        "check", "G", 200, "muster check: seconds of each look, false alarms, the loaded part beside its floors",
        ("check_gpu.py", "--only", "passive", "full"), ("--only", "passive", "full"),
    ),
    Command(
        "check-run", "G", 360, "what a look costs a start, and a run beside it",
        ("check_gpu.py", "--trials", "2", "--only", "start", "beside"), ("--only", "start"),
    ),
    Command("snapshots", "H", 270, "what a snapshot each step costs, the first ones apart"),
)  # fmt: skip


def argv(command: Command, out: Path, *, smoke: bool) -> list[str]:
    """The program of ``command``; its result goes to ``out``."""
    if not command.program:
        return [sys.executable, str(HERE / "gpu_hour"), command.name, str(out), *(["--smoke"] if smoke else [])]
    program, *given = command.program
    arguments = ["--smoke", *command.smoke] if smoke else given
    return [sys.executable, str(HERE / program), *arguments, "--json", str(out)]


def play(command: Command, number: int, out: Path, env: dict[str, str], *, limit_s: float, smoke: bool) -> Any:
    """Run one command to its end or its limit. Never raises for what the command does."""
    name = f"{number:02d}-{command.name}"
    result, log = out / f"{name}.json", out / f"{name}.log"
    result.unlink(missing_ok=True)
    began = time.monotonic()
    keep = children()
    with log.open("w") as file:
        process = subprocess.Popen(
            argv(command, result, smoke=smoke), env=env, stdout=file, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            ended = f"exit code {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            ended = f"ended at its limit of {limit_s:.0f} s"
            process.kill()
            process.wait()
    end_children(keep)
    said = json.loads(result.read_text()) if result.exists() else {}
    found = said if not command.program else judged(command, said, smoke=smoke).to_json()
    why = "" if ended == "exit code 0" else "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    return {"about": command.about, "ended": ended, "seconds": round(time.monotonic() - began, 1), "why": why, **found}


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Processes whose parent dies become children of this one: agents and ranks have sessions of their own."""
    adopt = ctypes.CDLL(None, use_errno=True).prctl
    adopt(36, 1)  # PR_SET_CHILD_SUBREAPER, linux/prctl.h
    try:
        yield
    finally:
        adopt(36, 0)


def children() -> set[int]:
    """Of this process, all its threads."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def end_children(keep: Set[int]) -> None:
    """End whatever a command left: nothing may hold the GPU while the next one measures. ``keep``: older ones."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        left = children() - keep
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)  # its own children are ours then


def judged(command: Command, said: dict[str, Any], *, smoke: bool) -> Findings:
    """The claims that a benchmark's figures decide."""
    found = Findings(figures=said)
    if smoke or not said:
        return found
    if command.name.startswith("trainer"):
        (rows,) = said["shapes"].values()
        fast, bare = (rows.get(each, {}).get("tokens_per_s") for each in ("muster_compiled", "bare_compiled"))
        both = fast is not None and bare is not None
        found.claim("Muster is at most 3 % slower than a bare compiled loop", fast >= 0.97 * bare if both else None,
                    f"{fast} and {bare} tokens/s")  # fmt: skip
        mfu = (rows.get("muster_compiled", {}).get("mfu") or {}).get("causal")
        least = EXPECTED[command.name]
        reached = None if mfu is None else mfu >= least
        found.claim(f"MFU is at least {least:.0%} (docs/explanation/plan.md)", reached, mfu)
    elif command.name.startswith("check"):
        _judge_check(found, said)
    else:
        for case, figures in said["cases"].items():
            again = figures["steps_again"]
            found.claim(f"{case}: no applied step is redone", again <= 0, f"L {figures['l_s']} s, {again} again")
    return found


def _judge_check(found: Findings, said: dict[str, Any]) -> None:
    """As far as it got: each part is in the file once it has ended."""
    passive, full, start, beside = (said.get(name) for name in ("passive", "full", "start", "beside"))
    if passive:
        found.claim("a passive look takes at most 2 s", passive["seconds"] <= 2.0, f"{passive['seconds']} s")
        text = f"{passive['looks']} looks at a sound machine raise no alarm"
        found.claim(text, passive["alarms"] == 0, passive["first_alarm"] or None)
    if full:
        found.claim("a full look takes at most 30 s", full["seconds"] <= 30.0, f"{full['seconds']} s")
        sound = full["verdict"] in ("healthy", "note") and not full["failed"]
        found.claim("the loaded part finds a sound machine sound", sound, [full["verdict"], full["failed"]])
        for row in full["figures"]:
            if row["floor"] is not None:
                value = None if row["value"] is None else row["value"] >= row["floor"]
                found.claim(f"{row['what']} is above its floor", value, [row["value"], row["floor"], row["unit"]])
    if start:
        times = {mode: row["seconds"] for mode, row in start.items()}
        found.claim("a passive look holds up a start by at most 2 s", times["passive"] - times["off"] <= 2.0, times)
    if beside:
        steps = (beside["step_s"], beside["step_beside_s"])
        found.claim("looks beside a run slow its steps by less than 5 %", steps[1] <= 1.05 * steps[0], steps)
        found.claim("no look beside a run costs its host", not {*beside["verdicts"]} & FAULTY, beside["verdicts"])


#: Verdicts by which a host is taken out of a run.
FAULTY = {"reset", "drain", "replace"}
#: The lower end of what docs/explanation/plan.md expects of the first measurement, by the CAUSAL convention.
EXPECTED = {"trainer-1b": 0.25, "trainer-8b-lora": 0.30}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pack", type=Path, metavar="WHEELS", help="download what an image may lack; needs a network")
    parser.add_argument("--python", nargs="*", default=[".".join(map(str, sys.version_info[:2]))], help="the image's")
    parser.add_argument("--wheels", type=Path, help="folder made by --pack")
    parser.add_argument("--bundle", choices=sorted({each.bundle for each in COMMANDS}))
    parser.add_argument("--only", nargs="*", choices=[each.name for each in COMMANDS])
    parser.add_argument("--out", type=Path, help="folder of results")
    parser.add_argument("--list", action="store_true", help="what would run")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args()
    chosen = [
        (number, each) for number, each in enumerate(COMMANDS, 1)
        if (options.bundle in (None, each.bundle)) and (options.only is None or each.name in options.only)
    ]  # fmt: skip
    if options.list:
        for number, each in chosen:
            print(f"{each.bundle} {number:2d} {each.name:17s} {each.limit_s:4d} s  {each.about}")
        return 0
    if options.pack:
        print(pack(options.pack, options.python))
        return 0
    if options.out is None:
        parser.error("--out: a folder for the results")
    return hour(chosen, options)


def hour(chosen: list[tuple[int, Command]], options: argparse.Namespace) -> int:
    """Run the chosen commands; 1 where one did not end well."""
    with adopting_orphans():
        return _hour(chosen, options)


def _hour(chosen: list[tuple[int, Command]], options: argparse.Namespace) -> int:
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    record = options.out / "hour.json"
    results: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    paths = [str(HERE.parent / "src")]
    if options.wheels:
        print(install(options.wheels, options.out / "site"), flush=True)
        paths.append(str(options.out / "site"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (*paths, os.environ.get("PYTHONPATH"))))}
    env.setdefault("HF_HUB_OFFLINE", "1")
    bad = 0
    for number, command in chosen:
        left = BUNDLE_S - (time.monotonic() - began) if options.bundle else command.limit_s
        if options.bundle and left < 20:
            results[command.name] = {"ended": "not started: the bundle's time is over", "about": command.about}
        else:
            limit_s = min(command.limit_s, left)
            results[command.name] = play(command, number, options.out, env, limit_s=limit_s, smoke=options.smoke)
        done = results[command.name]
        bad += done["ended"] != "exit code 0"
        record.write_text(json.dumps(results, indent=1) + "\n")  # as far as it got: a lent GPU may be taken back
        print(f"{number:2d} {command.name}: {done['ended']}, {done.get('seconds', 0)} s ({command.about})")
        for each in done.get("claims", []):
            print(f"     {line(each)}")
        if done.get("why"):
            print("     " + done["why"].replace("\n", "\n     "))
        sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
