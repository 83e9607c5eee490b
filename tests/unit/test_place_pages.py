"""The pages of places: their commands parse, run files hold, and what is replaced for another place renders there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from muster.cli import main
from muster.config import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "how-to" / f"{name}.md" for name in ("gke", "own-loop", "vertex")]
BLOCK = re.compile(r"<!-- checked: tests/unit/test_place_pages\.py -->\n```(\w+)\n(.*?)```", re.DOTALL)


def lines(page: Path) -> list[str]:
    """Commands of the page's blocks, those over several lines as one."""
    blocks = [text for language, text in BLOCK.findall(page.read_text()) if language == "console"]
    found = [line[2:] for text in blocks for line in text.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    assert found, page
    return found


def run_files(page: Path) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language == "yaml"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_ours_parses(page: Path) -> None:
    group = typer.main.get_command(main.app)
    commands = group.commands  # type: ignore[attr-defined]
    for line in lines(page):
        words = shlex.split(line)
        if words[0] != "muster":
            continue
        assert words[1] in commands, line
        command = commands[words[1]]
        context = command.context_class(command, info_name=words[1])
        command.parse_args(context, words[2:])  # raises for an option that there is not


@pytest.mark.parametrize(
    "line", [line for line in lines(ROOT / "docs" / "how-to" / "own-loop.md") if " render " in line]
)
def test_what_is_replaced_for_another_place_renders_there(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    loaded = load.load(ROOT / words[1], words[2:], environment=True)
    assert loaded.warnings == ()
    assert main.run(words) == 0
    kind = {"gke": "kind: JobSet", "slurm": "#SBATCH --nodes=8", "vertex": '"replicaCount": "7"'}
    assert kind[loaded.spec.backend] in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gke", "vertex"])
def test_what_a_first_run_costs_is_what_plan_says(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    page = ROOT / "docs" / "how-to" / f"{name}.md"
    (text,) = run_files(page)
    (tmp_path / "first.yaml").write_text(text)
    assert load.load(tmp_path / "first.yaml", environment=True).spec.backend == name
    assert main.run(["plan", str(tmp_path / "first.yaml")]) == 0
    said = capsys.readouterr().out
    cost = re.search(r"cost +(\$[\d.]+) \(p90 (\$[\d.]+)\).* (\$[\d.]+)/h", said)
    assert cost is not None, said
    section = page.read_text().partition("## From an empty project\n")[2].partition("\n## ")[0]
    assert set(cost.groups()) <= set(re.findall(r"\$\d+\.\d+", section))
    requests = re.search(r"reads an hour at most, (\$[\d.]+)/h", said)
    assert requests is None or f"at most {requests[1]} an hour" in section
    (date,) = set(re.findall(r"prices of (\d{4}-\d\d-\d\d) and before", said))
    assert f"{date} and before" in section
    table = (ROOT / "src/muster/catalog/gke/leftovers.yaml").read_text()
    dated = re.search(r"^date: (\S+)$", table, re.MULTILINE)
    assert dated is not None and dated[1] in section.partition("the rest is")[2]
    for row in ("$0.10 an hour", "{e2-standard-4: 0.134}", "$0.02 a GB and month", "$0.10 a GB and month"):
        assert row in table, f"{row}: the pages say so"
