"""A package imports only the packages beneath it; no import circles; torch and the environment where they belong.

Every import counts: at module level, inside a function, under ``TYPE_CHECKING``.
"""

import re
from collections import Counter
from pathlib import Path

import pytest
from imported import imports

SOURCE = Path(__file__).parents[2] / "src" / "muster"

BELOW: dict[str, set[str]] = {
    "core": set(),
    "protocol": {"core"},
    "storage": {"core", "transport", "protocol"},
    "transport": {"core", "protocol"},
    "catalog": {"core"},
    "policy": {"core"},
    "report": {"core"},
    "config": {"core"},
    "health": {"core", "catalog"},
    "probe": {"core", "health"},
    "checkpoint_format": {"core", "storage"},
    "plan": {"core", "config", "catalog", "checkpoint_format"},
    "data": {"core", "storage", "protocol", "config"},
    "tasks": {"core", "config", "data"},
    "checkpoint": {"core", "storage", "transport", "protocol", "checkpoint_format"},
    "trackers": {"core", "storage", "protocol", "config"},
    "train": {"core", "catalog", "storage", "protocol", "config", "checkpoint_format", "checkpoint", "data"},
    "train_jax": {"core", "protocol", "config", "checkpoint", "train"},
    "run": {"core", "storage", "protocol", "config", "checkpoint_format", "checkpoint", "train"},
    "hf": {"core", "run"},
    "rank": {"core", "catalog", "transport", "protocol", "config", "train", "train_jax", "run"},
    "agent": {"core", "storage", "transport", "protocol", "config", "checkpoint_format", "health", "trackers"},
    "backends": {"core", "storage", "transport", "protocol", "config", "catalog"},
    "supervise": {"core", "storage", "transport", "protocol", "config", "policy", "health"},
    "simulate": {"core", "protocol", "config", "policy", "health", "supervise"},
    "chaos": {"core", "storage", "protocol", "config"},
    "app": {
        "core", "storage", "transport", "protocol", "config", "catalog", "checkpoint_format", "policy", "report",
        "health", "probe", "plan", "data", "trackers", "backends", "supervise", "simulate", "chaos",
    },
    "accept": {
        "app", "core", "protocol", "config", "catalog", "report", "health", "probe", "storage", "backends", "chaos",
    },
    "handoff": {"app", "core", "storage", "config", "catalog", "data"},
    "cli": {"app", "accept", "handoff"},
}  # fmt: skip
LIBRARIES = {
    "torch": {"train", "train_jax", "checkpoint", "run", "hf", "rank", "probe"},
    "torchao": {"train"},
    "safetensors": {"train", "checkpoint"},
    "transformers": {"train", "train_jax", "hf", "rank", "data"},  # data: the tokenizer
    "peft": {"train", "train_jax", "rank"},
    "accelerate": {"train", "hf"},
    "jax": {"train_jax"},
    "jaxlib": set(),
    "pynvml": {"probe"},
}
#: Besides `cli` and programs (``python -m``): the list of our variables, and where programs inherit the environment.
READS_ENVIRONMENT = {"core/environment.py", "core/clock.py"}
ENVIRONMENT = re.compile(r"\bos\.getenv\b|\bos\.environb?\b(?!\[[^]]+\] = |\.(setdefault|update|pop)\()")
#: Besides `agent` and `backends`: a task's judge, the probe, and the two modules of `core` that start what these are
#: told to.
STARTS_PROGRAMS = {
    "tasks/text2sql/judge_process.py", "probe/programs.py", "core/processes.py", "core/clock.py",
}  # fmt: skip
PROGRAM = re.compile(
    r"\bsubprocess\.(Popen|run|call|check_call|check_output)\(|\bos\.(posix_spawnp?|exec[lv]\w*|spawn\w+)\("
)
SHELL = re.compile(r"\bshell=True|\bos\.(system|popen)\(|\bsubprocess\.(getoutput|getstatusoutput)\(")


def modules() -> dict[str, Path]:
    named = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


MODULES = modules()


def package(module: str) -> str:
    return module.split(".")[1] if module.startswith("muster.") else ""


def folder(module: str) -> str:
    """The package that a module lies in, at any depth; a module of ``muster`` itself stands for itself."""
    return module if MODULES[module].stem == "__init__" or module.count(".") < 2 else module.rpartition(".")[0]


def wrong(allowed) -> list[str]:
    """Every import that ``allowed(importing module, imported module)`` refuses."""
    return [
        f"{path.relative_to(SOURCE)}:{line} imports {target}"
        for module, path in MODULES.items()
        for target, line, _ in imports(path)
        if not allowed(module, target)
    ]


def test_a_package_imports_only_what_lies_beneath_it():
    assert {package(module) for module in MODULES} - {""} == BELOW.keys()

    def allowed(module, target):
        here, there = package(module), package(target)
        return not here or not there or here == there or there in BELOW[here]

    assert not wrong(allowed)


@pytest.mark.parametrize("group", [package, folder, lambda module: module], ids=["packages", "folders", "modules"])
def test_no_import_circles(group):
    graph: dict[str, set[str]] = {group(module): set() for module in MODULES}
    for module, path in MODULES.items():
        graph[group(module)] |= {group(target) for target, _, _ in imports(path) if target in MODULES}
    graph = {node: {target for target in targets - {node} if target} for node, targets in graph.items()}
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> None:
        assert node not in trail, " -> ".join([*trail[trail.index(node) :], node])
        if node not in done:
            for target in sorted(graph[node]):
                visit(target, [*trail, node])
            done.add(node)

    for node in graph:
        visit(node, [])


def test_libraries_stay_in_their_packages():
    assert not wrong(lambda module, target: package(module) in LIBRARIES.get(target.split(".")[0], {package(module)}))


def test_back_ends_do_not_know_each_other():
    """For all: files in ``backends`` itself, requests to Google's services, the host program, which knows none."""
    back_ends = {path.name for path in (SOURCE / "backends").iterdir() if path.is_dir()} - {"google", "host"}

    def allowed(module, target):
        here, there = (name.split(".")[2:3] if package(name) == "backends" else [] for name in (module, target))
        if here == ["host"] and there:
            return there == here
        return not here or not there or here == there or here[0] not in back_ends or there[0] not in back_ends

    assert not wrong(allowed)


def test_no_folder_has_more_than_twenty_files():
    assert not {
        str(folder): count for folder, count in Counter(path.parent for path in MODULES.values()).items() if count > 20
    }


def test_only_entry_points_read_the_environment():
    texts = {str(path.relative_to(SOURCE)): path.read_text() for path in MODULES.values()}
    assert not [
        f"{name}:{number}"
        for name, text in texts.items()
        if not name.startswith("cli/") and name not in READS_ENVIRONMENT and '\nif __name__ == "__main__":' not in text
        for number, line in enumerate(text.splitlines(), 1)
        if ENVIRONMENT.search(line)
    ]


def test_only_back_ends_agents_and_a_tasks_judge_start_programs():
    texts = {str(path.relative_to(SOURCE)): path.read_text() for path in MODULES.values()}
    starting = {name for name, text in texts.items() if PROGRAM.search(text)}
    assert {name for name in starting if not name.startswith(("agent/", "backends/"))} == STARTS_PROGRAMS


def test_no_program_of_ours_imports_from_the_current_folder():
    starts = [path for path in MODULES.values() if re.search(r'(executable|python), "-(P|m)"', path.read_text())]
    assert len(starts) >= 8
    assert not [str(path) for path in starts if re.search(r'(executable|python), "-m"', path.read_text())]


def test_no_shell_strings():
    assert not [str(path) for path in MODULES.values() if SHELL.search(path.read_text())]


def test_every_kind_of_import_counts(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from muster.core import events\n"
        "def function():\n    from muster.core.types import Layout\n    import torch.distributed\n"
    )
    assert set(imports(file)) == {
        ("typing", 1, True),
        ("muster.core.events", 3, False),
        ("muster.core.types", 5, False),
        ("torch.distributed", 6, False),
    }
