"""The floors hold: a module imports only what lies beneath it, nothing circles, torch stays on its floors."""

from pathlib import Path

from imported import imports

SOURCE = Path(__file__).parents[2] / "src" / "muster"

BELOW = {
    "core": set(),
    "catalog": {"core"},
    "policy": {"core"},
    "report": {"core"},
    "plan": {"core", "catalog"},
    "data": {"core"},
    "health": {"core"},
    "checkpoint": {"core"},
    "run": {"core", "train", "checkpoint"},  # the API for loops of one's own
    "train": {"core", "data", "checkpoint", "run"},  # `run` only in `foreign`, which starts such a loop
    "agent": {"core"},
    "backends": {"core", "catalog"},
    "supervise": {"core", "policy"},
    "simulate": {"core", "policy", "supervise"},
    "app": {"core", "catalog", "policy", "report", "plan", "data", "agent", "backends", "supervise", "simulate"},
    "cli": {"app", "core"},
}
MAY_IMPORT_TORCH = {"train", "checkpoint", "health", "run"}
TORCH = {"torch", "transformers", "peft", "accelerate", "safetensors"}


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def floor(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "muster" and len(parts) > 1 else None


def test_arrows_point_down():
    wrong = []
    for module, path in modules().items():
        here = floor(module)
        if here is None or here.startswith("__"):
            continue
        assert here in BELOW, f"{module}: unknown floor {here}"
        for target, line, _ in imports(path):
            there = floor(target)
            if there and there in BELOW and there != here and there not in BELOW[here]:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {target}")
    assert not wrong, wrong


def test_torch_stays_on_its_floors():
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {target}"
        for module, path in modules().items()
        for target, line, _ in imports(path)
        if target.split(".")[0] in TORCH
        and floor(module) not in MAY_IMPORT_TORCH
        and not (floor(module) == "data" and target.split(".")[0] == "transformers")
    ]
    assert not wrong, wrong


def test_back_ends_do_not_know_each_other():
    wrong = []
    for module, path in modules().items():
        parts = module.split(".")
        if floor(module) == "backends" and len(parts) > 2:
            wrong += [
                f"{module} imports {target}"
                for target, _, _ in imports(path)
                if target.startswith("muster.backends.") and target.split(".")[2] != parts[2]
            ]
    assert not wrong, wrong


def test_no_circles():
    known = modules()
    graph = {
        module: {target for target, _, top in imports(path) if top and target in known and target != module}
        for module, path in known.items()
    }
    state: dict[str, int] = {}

    def visit(module: str, trail: list[str]) -> None:
        if state.get(module) == 2:
            return
        assert state.get(module) != 1, " -> ".join([*trail[trail.index(module) :], module])
        state[module] = 1
        for target in sorted(graph[module]):
            visit(target, [*trail, module])
        state[module] = 2

    for module in graph:
        visit(module, [])
