"""Check the invariants I1-I8 in recorded runs: ``python tools/check_invariants.py [--json] RUN_DIR...``.

The checks are in ``muster.report.audit.invariants``, which shares no code with what wrote the history. I4 needs a run
to compare with: ``--reference RUN_DIR`` names one, ``--replay`` makes it from the recorded run file
(``tools/replay.py``: plain processes without supervisor or agent, in a folder that is removed unless the two differ).

Exit code 0: every history holds; 1: one does not; 2: it cannot be replayed, or the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replay import CannotReplay, Replay, plan, replay

from muster.report.audit.history import Finding
from muster.report.audit.invariants import broken, check


def main(argv: Sequence[str], output: Callable[[str], None] = print, info: Callable[[str], None] | None = None) -> int:
    """Check each folder; ``output`` takes the answer, ``info`` progress and errors (standard error)."""
    info = info or (lambda text: print(text, file=sys.stderr))
    given = _arguments(argv)
    answers: dict[str, dict[str, Finding]] = {}
    run_dir = ""
    try:
        plans: dict[str, Replay] = {}
        for run_dir in given.run_dirs if given.replay else []:  # all of them before the first takes its time
            plans[run_dir] = plan(run_dir, ranks=given.ranks)
        for run_dir in given.run_dirs:
            if run_dir in plans:
                answers[run_dir] = _against_a_replay(run_dir, plans[run_dir], given.bound_s, info)
            else:
                answers[run_dir] = check(run_dir, reference=given.reference, bound_s=given.bound_s)
    except CannotReplay as reason:
        info(f"error: cannot replay {run_dir}: {reason}")
        return 2
    if given.json:
        output(json.dumps({run_dir: to_json(findings) for run_dir, findings in answers.items()}, indent=1))
    else:
        for run_dir, findings in answers.items():
            output(run_dir)
            for line in report_lines(findings):
                output(f"  {line}")
    return 1 if any(broken(findings) for findings in answers.values()) else 0


def to_json(findings: Mapping[str, Finding]) -> dict[str, Any]:
    """For programs."""
    return {
        "holds": not broken(findings),
        "invariants": {
            name: {"holds": not finding.problems, "checked": finding.checked, "problems": finding.problems}
            for name, finding in findings.items()
        },
    }


def report_lines(findings: Mapping[str, Finding]) -> Iterator[str]:
    """One line an invariant, and one a problem."""
    for name, finding in findings.items():
        verdict = "BROKEN" if finding.problems else "holds" if finding.checked else "not recorded in this history"
        yield f"{name:<4}{verdict}" + (f" ({finding.checked} facts)" if finding.checked else "")
        yield from (f"      {problem}" for problem in finding.problems)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="check the invariants I1-I8 in recorded runs")
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--json", action="store_true")
    against = parser.add_mutually_exclusive_group()
    against.add_argument("--reference", metavar="RUN_DIR", help="an unfailed run of the same file (for I4)")
    against.add_argument(
        "--replay", action="store_true",
        help="make that run (for I4): the recorded run file once more up to the last applied step, in plain processes "
        "on this machine, without supervisor or agent; refused where an unfailed run need not give the same numbers",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=int, metavar="N",
        help="replay a run with training.exact on N ranks; default: the layout that the run began with",
    )  # fmt: skip
    parser.add_argument("--bound-s", type=float, default=60.0, help="longest L that counts as healed (I8)")
    given = parser.parse_args(argv)
    if given.ranks is not None and (not given.replay or given.ranks < 1):
        parser.error("--ranks needs --replay, and a number of at least 1")
    return given


def _against_a_replay(run_dir: str, request: Replay, bound_s: float, info: Callable[[str], None]) -> dict[str, Finding]:
    """The findings, with I4 against a replay, whose folder is kept where it differs."""
    folder = Path(tempfile.mkdtemp(prefix="muster-replay-"))
    info(f"{run_dir}: replaying {request.last_step} steps on {sum(request.ranks_of_hosts)} ranks in {folder}")
    keep = False
    try:
        replay(request, folder)
        findings = check(run_dir, reference=folder, bound_s=bound_s)
        keep = bool(findings["I4"].problems)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if keep:
        info(f"the replay differs; it is kept in {folder}")
    return findings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
