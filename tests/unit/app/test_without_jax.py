"""Where JAX is not installed a run on TPUs is planned, shown and rendered; only training on this machine needs it."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "text2sql-tpu.yaml"
#: Ends with the last command's exit code, where those before it ended well.
WITHOUT_JAX = """\
import sys
sys.modules.update(dict.fromkeys(("jax", "jaxlib")))  # an import fails, and no such module is found
from muster.cli.main import main
code = 0
for words in {commands}:
    assert not code, code
    sys.argv = ["muster", *words]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
sys.exit(code)
"""


def muster(tmp_path: Path, *commands: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX.format(commands=commands)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "MUSTER_HOME": str(tmp_path / "home")},
    )  # fmt: skip


def test_planning_showing_and_rendering_need_none(tmp_path):
    on_gke = ("backend=gke", "resources.machine=ct5lp-hightpu-4t", "resources.image=r/i:1", "run_dir=gs://b/runs/x")
    done = muster(
        tmp_path, ("plan", str(EXAMPLE)), ("show", str(EXAMPLE)), ("submit", str(EXAMPLE), "--dry-run", *on_gke),
        ("render", str(EXAMPLE), *on_gke),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "fsdp" in done.stdout and "google.com/tpu" in done.stdout


def test_training_here_is_refused_before_anything_is_made(tmp_path):
    short = ("training.steps=1", "evaluation.num_questions=1", "evaluation.final_num_questions=1")  # should it be taken
    done = muster(tmp_path, ("train", str(EXAMPLE), f"run_dir={tmp_path / 'run'}", *short))
    assert done.returncode == 2 and "resources.device: tpu needs jax: not installed" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()
