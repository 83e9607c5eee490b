"""Makes the README's pictures from a real run: ``python tools/pictures.py`` (about a minute; Chromium for the page).

A small model trains on two CPU ranks; after some steps one rank is killed. ``docs/pictures/watch.svg`` is what
``muster watch`` shows right after the recovery, ``docs/pictures/report.png`` the page of ``muster report --html``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from muster.app.inspect.watch import View, watch
from muster.cli.watch import _render

ROOT = Path(__file__).resolve().parents[1]
RUN = [str(ROOT / "examples" / "text2sql-cpu.yaml"), "training.steps=120", "evaluation.num_questions=20"]
CHROMIUM = [
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking",
    "--window-size=1100,900", "--virtual-time-budget=5000",
]  # fmt: skip


def main() -> None:
    muster = [sys.executable, "-m", "muster.cli.main"]
    with tempfile.TemporaryDirectory(prefix="muster-pictures-") as temporary:
        os.environ["MUSTER_HOME"] = str(Path(temporary) / "home")
        run_dir = Path(temporary) / "text2sql"
        subprocess.run([*muster, "submit", *RUN, f"run_dir={run_dir}"], check=True)
        try:
            save_svg(after_a_kill(run_dir), ROOT / "docs" / "pictures" / "watch.svg")
            subprocess.run([*muster, "logs", "--follow", str(run_dir)], check=False, stdout=subprocess.DEVNULL)
            report = [*muster, "report", str(run_dir), "--html"]
            page = subprocess.run(report, check=True, capture_output=True, text=True).stdout.strip()
            screenshot(Path(page), ROOT / "docs" / "pictures" / "report.png")
        finally:
            subprocess.run([*muster, "down", str(run_dir)], check=False)


def after_a_kill(run_dir: Path) -> View:
    """The live view once training is beyond the step at which a rank was killed."""
    killed_at = None
    for view in watch(str(run_dir), every_s=0.2):
        if view.ended:
            raise SystemExit("the run ended before a rank was killed and replaced")
        if killed_at is None and (view.step or 0) >= 40:
            pids = [rank.pid for host in view.hosts.values() for rank in host.ranks.values() if rank.rank == 1]
            os.kill(pids[0], signal.SIGKILL)
            killed_at = view.step
        elif killed_at is not None and view.attempt > 1 and (view.step or 0) > killed_at + 10 and view.account:
            return view
        time.sleep(0.05)
    raise SystemExit("the view ended")


def save_svg(view: View, target: Path) -> None:
    console = Console(record=True, width=110, file=open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)
    console.print(_render(view))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(console.export_svg(title="muster watch last"), encoding="utf-8")


def screenshot(page: Path, target: Path) -> None:
    program = shutil.which("chromium") or shutil.which("google-chrome") or sys.exit("no Chromium for the page")
    profile = page.with_name("profile")
    argv = [str(program), *CHROMIUM, f"--user-data-dir={profile}", f"--screenshot={target}", page.as_uri()]
    subprocess.run(argv, check=True, stderr=subprocess.DEVNULL)
    print(json.dumps({"written": str(target)}))


if __name__ == "__main__":
    main()
