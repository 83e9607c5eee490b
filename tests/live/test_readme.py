"""Every block of the README is executed or checked, and every command is documented."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.config import load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"(?:<!-- (\w+): (.*?) -->\n)?```(\w+)\n(.*?)```", README, re.DOTALL)
#: What makes the examples small enough for a test.
SMALLER = (
    "data.sources.0.rows=400",
    "evaluation.num_questions=4",
    "evaluation.final_num_questions=4",
    "evaluation.num_sequences=4",
)


def blocks(language: str) -> list[str]:
    return [text for _, _, found, text in BLOCKS if found == language]


def test_every_block_says_how_it_is_held() -> None:
    assert BLOCKS
    for how, why, _, text in BLOCKS:
        assert how in ("executed", "checked"), f"a block without a mark: {text}"
        for path in re.findall(r"tests/\S+\.py", why):
            assert (ROOT / path).exists(), path


def test_every_command_is_documented() -> None:
    import typer

    from muster.cli.main import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    page = (ROOT / "docs/reference/commands.md").read_text()
    assert set(re.findall(r"^\| `muster (\w[\w-]*)", page, re.MULTILINE)) == set(commands)
    table = README.partition("## Commands\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [a-z ]+ \| (`.*) \|$", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(commands) - {"version"}


def test_every_command_line_in_the_readme_parses() -> None:
    import typer

    from muster.cli.main import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [line[2:] for text in blocks("console") for line in text.splitlines() if line.startswith("$ ")]
    assert lines
    for line in lines:
        program, name, *rest = shlex.split(line)
        assert program == "muster" and name in commands, line
        for word in rest:
            if word.startswith("examples/"):
                assert (ROOT / word).exists()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_run_files_in_the_readme_hold() -> None:
    for text in blocks("yaml"):
        assert load.loads(text).warnings == ()


def test_extras_in_the_readme_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\.\[([\w,]+)\]", README):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_what_is_said_to_be_executed_elsewhere_is() -> None:
    assert "./setup.sh test" in (ROOT / ".ci" / "run").read_text()
    verbs = (ROOT / "tests" / "live" / "test_verbs_live.py").read_text()
    for verb in ("train", "logs", "export", "recover"):
        assert f'"{verb}"' in verbs


@pytest.mark.live
def test_the_first_run_as_written(tmp_path: Path) -> None:
    """The block's commands, one after the other, in a copy's place; the run is made smaller."""
    (block,) = [text for _, why, _, text in BLOCKS if "in this order" in why]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    env = {
        **os.environ,
        "MUSTER_HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def muster(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)

    try:
        for line in block.splitlines():
            _type_line(line, muster)
    finally:
        muster("muster", "down", "first-run")


def _type_line(line: str, muster: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    words = shlex.split(line.removeprefix("$ "))
    if words[1] in ("data", "submit"):
        words += SMALLER
    done = muster(*words)
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.stdout or words[1] in ("stop", "down"), f"{line} says nothing"
    until = time.monotonic() + 90
    while words[1] == "status" and "'step': None" in str(json.loads(muster(*words, "--json").stdout)):
        assert time.monotonic() < until  # a reader takes as long to read on
        time.sleep(0.3)


@pytest.mark.live
def test_the_first_command_as_written(tmp_path: Path) -> None:
    """``./setup.sh run`` in the environment at hand (nothing is installed anew), with fewer steps."""
    venv = Path(sys.executable).parent.parent
    if not (venv / "pyvenv.cfg").exists() or not (venv / "bin" / "muster").exists():
        pytest.skip("these tests do not run in a virtual environment that has muster")
    env = {**os.environ, "MUSTER_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env["MUSTER_VENV"] = str(venv)
    script = (ROOT / "setup.sh").read_text().replace("  install train,data\n", "  :\n", 1)
    assert "install train,data" not in script.split("run)")[1].split(";;")[0]
    (tmp_path / "setup.sh").write_text(script)
    for name in ("examples", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    few = (
        "training.steps=6",
        "training.optimizer.warmup_steps=2",
        "evaluation.every_steps=0",
        "checkpoint.every_steps=0",
    )
    done = subprocess.run(
        ["bash", str(tmp_path / "setup.sh"), "run", "examples/text2sql-cpu.yaml", *SMALLER, *few],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "execution accuracy" in done.stdout and "samples after step 6" in done.stdout
    assert "done: " in done.stderr
