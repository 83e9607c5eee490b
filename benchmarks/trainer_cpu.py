"""Muster's trainer against a bare FSDP2 loop and TRL's SFTTrainer, in one run on this machine's CPU.

    benchmarks/peers/setup.sh trl                       # once; without it TRL's columns are empty, and say so
    python benchmarks/trainer_cpu.py [--json FILE] [--rounds 3] [--only tokens rows prepare checkpoint] [--smoke]

Tables: tokens/s on the same model and the same number of tokens a step, at 1 and 2 ranks; supervised tokens/s on the
built-in text-to-SQL rows; data preparation; the stall of a checkpoint; the start to the first step. Systems take
turns within a round, so that a busy moment of the machine meets all of them; medians over the rounds. What each
figure grants whom is in ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]
from loops import job as jobs  # noqa: E402
from loops.meeting import WARMUP  # noqa: E402

SMALL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
#: 25 M parameters, 300 MB of training state: enough for a save to take a while.
MIDDLE = {**SMALL, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 7}
TINY = {**SMALL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
#: ``units`` of ``bare_loop.py``.
BARE = ("layers", "whole", "replicated")


def layouts(ranks: int) -> dict[str, dict[str, Any]]:
    """Muster's layouts that are measured beside the bare loops': the default, and on several ranks what
    ``parallelism: auto`` takes. The keys of each."""
    if ranks == 1:
        return {"default": {}}
    return {"default": {}, "auto": {"parallelism": "auto"}}


class Bench:
    """The settings and the scratch folder of one call."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.rounds, self.smoke, self.folder, self.count = arguments.rounds, arguments.smoke, folder, 0
        self.ranks: list[int] = arguments.ranks
        self.model = TINY if self.smoke else SMALL
        # Standbys begin after the first step, and share two cores with two ranks for the steps after it.
        self.steps = 6 if self.smoke else 40
        self.trl = jobs.peer_python("trl")

    def place(self) -> Path:
        self.count += 1
        return self.folder / f"{self.count:03d}"

    def job(self, **changes: Any) -> dict[str, Any]:
        return jobs.job(self.model, **{"steps": self.steps, **changes})

    def muster(self, found: dict[str, Any], ranks: int, **changes: Any) -> jobs.Measured:
        spec = jobs.muster_spec(found, self.folder / "cache", ranks=ranks, **changes)
        events, began = jobs.run_muster(spec, self.place(), ranks=ranks)
        return jobs.measured(jobs.steps_of(events), began, warmup=WARMUP)

    def loop(self, name: str, found: dict[str, Any], ranks: int, python: str = sys.executable) -> jobs.Measured:
        seen, began = jobs.run_loop(name, found, ranks=ranks, folder=self.place(), python=python)
        return jobs.measured(seen, began, warmup=WARMUP)

    def muster_alone(self, found: dict[str, Any], ranks: int, **changes: Any) -> jobs.Started:
        spec = jobs.muster_spec(found, self.folder / "cache", ranks=ranks, **changes)
        return jobs.muster_alone(spec, ranks=ranks, folder=self.place())

    def loop_alone(self, name: str, found: dict[str, Any], ranks: int) -> jobs.Started:
        trl = name == "trl_loop" and found["kind"] == "trl"
        python = str(self.trl) if trl else sys.executable
        return jobs.loop(name, found, ranks=ranks, folder=self.place(), python=python)

    def turns(self, systems: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
        """Every system once a round, in turned order; a system that fails is left out, and why is printed."""
        found: dict[str, list[Any]] = {name: [] for name in systems}
        for number in range(self.rounds):
            names = list(systems)[number % len(systems) :] + list(systems)[: number % len(systems)]
            for name in names:
                try:
                    found[name].append(systems[name]())
                except RuntimeError as error:
                    print(f"  {name} failed: {str(error)[-600:]}", flush=True)
        return found


def tokens(bench: Bench) -> dict[str, Any]:
    """Tokens/s on random tokens in full sequences, and seconds from the command to the first step's end."""
    found: dict[str, Any] = {}
    for ranks in bench.ranks:
        one = bench.job(batch=4, micro=2, sequence_length=64 if bench.smoke else 256)
        every = layouts(ranks)
        without = {"checkpoint__snapshot_every_steps": 0}
        systems = {
            f"muster {name}": lambda one=one, ranks=ranks, keys=keys: bench.muster(one, ranks, **keys)
            for name, keys in {
                **every,
                **{f"{name}, no snapshots": keys | without for name, keys in every.items()},
            }.items()
        }
        for name in BARE:
            systems[f"bare {name}"] = lambda one=one, ranks=ranks, name=name: bench.loop(
                "bare_loop", {**one, "units": name}, ranks
            )
        systems.update(trl_of(bench, one, ranks, random_tokenizer(bench)))
        seen = bench.turns(systems)
        found[f"ranks_{ranks}"] = {name: summary(values) for name, values in seen.items() if values}
        table(f"tokens/s, random tokens, {ranks} rank(s)", found[f"ranks_{ranks}"], "tokens_per_s")
        table(f"command to the end of the first step, s, {ranks} rank(s)", found[f"ranks_{ranks}"], "start_s")
    return found


def cpu(bench: Bench) -> dict[str, Any]:
    """Processor seconds of 1000 tokens: what a busy machine's clock on the wall cannot tell.

    All systems train at the same time, so that whatever disturbs one disturbs the others; counted are rank 0's steps
    within the time in which all of them train, times the ranks. Muster's ranks run without agents and snapshots here.
    """
    full = {"batch": 4, "micro": 2, "sequence_length": 64 if bench.smoke else 256, "steps": 12 if bench.smoke else 40}
    path, tokenizer = text2sql_rows(bench, 400 if bench.smoke else 6000)
    found: dict[str, Any] = {}
    for ranks in bench.ranks:
        one = bench.job(**full)
        systems: dict[str, Callable[[], jobs.Started]] = {
            f"muster {name}": lambda ranks=ranks, one=one, keys=keys: bench.muster_alone(one, ranks, **keys)
            for name, keys in layouts(ranks).items()
        }
        for name in BARE:
            systems[f"bare {name}"] = lambda ranks=ranks, one=one, name=name: bench.loop_alone(
                "bare_loop", {**one, "units": name}, ranks
            )
        kind = "trl" if bench.trl else "hf"
        systems[kind] = lambda ranks=ranks, one=one, kind=kind: bench.loop_alone(
            "trl_loop", {**one, "kind": kind, "tokenizer": str(tokenizer)}, ranks
        )
        found[f"ranks_{ranks}"] = together(bench, systems, ranks, "tokens", f"random tokens, {ranks} rank(s)")
    one = bench.job(**full | {"sequence_length": 256}, rows=str(path), tokenizer=str(tokenizer))
    if bench.trl:
        rows_a_step = round(one["batch"] * rows_per_sequence(bench, one))
        padded = {**one, "packing": False, "batch": rows_a_step, "micro": rows_a_step}
        systems = {
            "muster": lambda: bench.muster_alone(one, 1),
            "trl_padded": lambda: bench.loop_alone("trl_loop", padded, 1),
            "trl_packed": lambda: bench.loop_alone("trl_loop", {**one, "micro": 4}, 1),
        }
        found["rows"] = together(bench, systems, 1, "supervised", "supervised tokens of text2sql rows, 1 rank")
    return found


def together(
    bench: Bench, systems: dict[str, Callable[[], jobs.Started]], ranks: int, counted: str, title: str
) -> dict[str, Any]:
    """Every system at the same time, once a round."""
    rounds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(bench.rounds):
        meeting = bench.place()
        meeting.mkdir(parents=True)
        started = {name: make().meeting(meeting, len(systems)) for name, make in systems.items()}
        jobs.run_together(list(started.values()), 600)
        seen = {name: json.loads((one.log.parent / "out.json").read_text()) for name, one in started.items()}
        begin = max(values["ends_ns"][WARMUP - 1] for values in seen.values())
        end = min(values["ends_ns"][-1] for values in seen.values())
        for name, values in seen.items():
            inside = [number for number, at in enumerate(values["ends_ns"]) if begin <= at <= end]
            if len(inside) < 2:
                print(f"  {name} made no step while all the others trained: left out", flush=True)
                continue
            spent = (values["cpu_ns"][inside[-1]] - values["cpu_ns"][inside[0]]) / 1e9 * ranks
            rounds[name].append(1000 * spent / sum(values[counted][number] for number in inside[1:]))
    found = {
        name: {"cpu_s": round(statistics.median(values), 4), "rounds": [round(value, 4) for value in values]}
        for name, values in rounds.items()
        if values
    }
    table(f"processor seconds of 1000 {title} (less is better)", found, "cpu_s")
    return found


def rows(bench: Bench) -> dict[str, Any]:
    """Supervised tokens/s on short rows, one rank: packing with documents kept apart against TRL's ways."""
    path, tokenizer = text2sql_rows(bench, 400 if bench.smoke else 6000)
    one = bench.job(batch=4, micro=2, sequence_length=256, rows=str(path), tokenizer=str(tokenizer))
    systems = {"muster": lambda: bench.muster(one, 1)}
    found_note: dict[str, Any]
    if bench.trl:
        python = str(bench.trl)
        # As many rows a step as the packed sequences of one hold: the same work for the optimizer.
        rows_a_step = round(one["batch"] * rows_per_sequence(bench, one))
        unpacked = {**one, "packing": False, "batch": rows_a_step, "micro": rows_a_step}
        systems["trl_padded"] = lambda: bench.loop("trl_loop", unpacked, 1, python)
        systems["trl_packed"] = lambda: bench.loop("trl_loop", {**one, "micro": 4}, 1, python)
        found_note = {"rows_a_step": rows_a_step}
    else:
        found_note = {"trl": "not installed: benchmarks/peers/setup.sh trl"}
    found = {name: summary(values) for name, values in bench.turns(systems).items() if values}
    table("supervised tokens/s, text2sql rows, 1 rank", found, "supervised_per_s")
    return {**found, **found_note}


def prepare(bench: Bench) -> dict[str, Any]:
    """Reading, tokenising, masking and packing the same rows with the same tokenizer, nothing cached."""
    path, tokenizer = text2sql_rows(bench, 400 if bench.smoke else 20000)
    found: dict[str, Any] = {}
    for workers in (1, 2):
        one = bench.job(rows=str(path), tokenizer=str(tokenizer), workers=workers, prepare_only=True)
        systems = {"muster": lambda one=one: prepare_muster(bench, one)}
        if bench.trl:
            systems["trl"] = lambda one=one: prepare_trl(bench, one)
        seen = {name: values for name, values in bench.turns(systems).items() if values}
        part = {
            name: {
                "tokens": values[0][0],
                "seconds": round(statistics.median(s for _, s in values), 3),
                "tokens_per_s": round(statistics.median(t / s for t, s in values)),
                "rounds": [round(t / s) for t, s in values],
            }
            for name, values in seen.items()
        }
        found[f"workers_{workers}"] = part
        table(f"data preparation, tokens/s, {workers} process(es)", part, "tokens_per_s")
    return found


def prepare_muster(bench: Bench, one: dict[str, Any]) -> tuple[int, float]:
    """(tokens, seconds) of ``prepare`` in a fresh process with an empty cache, imports left out as for TRL."""
    place = bench.place()
    place.mkdir(parents=True)
    spec = jobs.muster_spec(one, place / "cache", ranks=1)
    (place / "spec.json").write_text(json.dumps(spec))
    code = (
        "import json, sys, time; from pathlib import Path; from muster.config.spec import RunSpec; "
        "from muster.data.prepare import prepare; import muster.data.tokenise, tokenizers, numpy; "
        "place = Path(sys.argv[1]); spec = RunSpec.model_validate(json.loads((place / 'spec.json').read_text()))\n"
        "if __name__ == '__main__':\n"
        "    began = time.monotonic(); found = prepare(spec, run_dir=place / 'run')\n"
        "    seconds = time.monotonic() - began\n"
        "    (place / 'out.json').write_text(json.dumps([int(found.train.tokens), seconds]))\n"
    )
    (place / "prepare.py").write_text(code)  # a file: worker processes import the main module
    command = [sys.executable, str(place / "prepare.py"), str(place)]
    jobs.run(command, jobs.environment(1, "cpu"), place / "log", 300)
    count, seconds = json.loads((place / "out.json").read_text())
    return count, seconds


def prepare_trl(bench: Bench, one: dict[str, Any]) -> tuple[int, float]:
    seen, _ = jobs.run_loop("trl_loop", one, ranks=1, folder=bench.place(), python=str(bench.trl))
    return seen["prepared"]["tokens"], seen["prepared_ns"] / 1e9


def checkpoint(bench: Bench) -> dict[str, Any]:
    """How long training waits for a save, asynchronous and synchronous; 2 ranks."""
    one = jobs.job(bench.model if bench.smoke else MIDDLE, steps=13, batch=2, micro=1, sequence_length=64)

    def play(asynchronous: bool) -> list[dict[str, float]]:
        spec = jobs.muster_spec(
            one, bench.folder / "cache", ranks=2,
            checkpoint={"every_steps": 4, "asynchronous": asynchronous, "snapshot_every_steps": 0},
        )  # fmt: skip
        events, _ = jobs.run_muster(spec, bench.place(), ranks=2)
        saves = [event for event in events if event.kind == "checkpoint.committed" and event.step < one["steps"]]
        return [{key: event.detail[key] / 1e9 for key in ("stall_ns", "duration_ns")} for event in saves]

    seen = bench.turns({"asynchronous": lambda: play(True), "synchronous": lambda: play(False)})
    found: dict[str, Any] = {}
    for name, lists in seen.items():
        saves = [save for values in lists for save in values]
        if saves:
            found[name] = {
                "stall_s": round(statistics.median(save["stall_ns"] for save in saves), 4),
                "worst_stall_s": round(max(save["stall_ns"] for save in saves), 4),
                "saved_after_s": round(statistics.median(save["duration_ns"] for save in saves), 4),
                "saves": len(saves),
            }
    if len(found) == 2:
        found["ratio"] = round(found["asynchronous"]["stall_s"] / found["synchronous"]["stall_s"], 3)
    print(f"\ncheckpoint stall, 2 ranks: {json.dumps(found)}", flush=True)
    return found


def trl_of(bench: Bench, one: dict[str, Any], ranks: int, tokenizer: Path) -> dict[str, Callable[[], Any]]:
    """TRL in its own environment, or the HF Trainer of this one, or nothing."""
    if bench.trl:
        settings = {**one, "tokenizer": str(tokenizer)}
        return {"trl": lambda: bench.loop("trl_loop", settings, ranks, str(bench.trl))}
    try:
        import accelerate  # noqa: F401 (the HF Trainer needs it)
    except ImportError:
        print("neither TRL (benchmarks/peers/setup.sh trl) nor accelerate here: no third system", flush=True)
        return {}
    return {"hf_trainer": lambda: bench.loop("trl_loop", {**one, "kind": "hf"}, ranks)}


def text2sql_rows(bench: Bench, count: int) -> tuple[Path, Path]:
    """A JSONL of the generator's rows (level 2), and the folder of a tokenizer trained on them; made once."""
    from muster.config.spec import RunSpec
    from muster.data.prepare import prepare as prepare_data
    from muster.data.source_type import open_source
    from muster.tasks.text2sql.source import Text2SqlSource

    path, tokenizer = bench.folder / f"rows-{count}.jsonl", bench.folder / f"tokenizer-{count}" / "tokenizer"
    if not path.exists():
        source = Text2SqlSource(type="text2sql", level=2, rows=count, heldout_rows=1)
        with path.open("w") as file:
            for row in open_source(source).rows():
                file.write(json.dumps({"prompt": row["prompt"], "completion": row["completion"]}) + "\n")
        trained = bench.job(rows=str(path), tokenizer={"vocab_size": 1024, "kind": "bpe"})
        spec = RunSpec.model_validate(jobs.muster_spec(trained, bench.folder / "cache", ranks=1))
        prepare_data(spec, run_dir=tokenizer.parent)
    return path, tokenizer


def rows_per_sequence(bench: Bench, one: dict[str, Any]) -> float:
    """Documents in a packed sequence, on average."""
    from muster.config.spec import RunSpec
    from muster.data.prepare import prepare as prepare_data

    spec = RunSpec.model_validate(jobs.muster_spec(one, bench.folder / "cache", ranks=1))
    stats = prepare_data(spec, run_dir=bench.folder / "counted").stats
    return float(stats["documents"] / stats["sequences"])


def random_tokenizer(bench: Bench) -> Path:
    """TRL wants a tokenizer even for rows that are tokens already."""
    return text2sql_rows(bench, 400)[1]


def summary(values: list[jobs.Measured]) -> dict[str, Any]:
    """Medians over rounds, and every round's figures."""
    return {
        "tokens_per_s": round(statistics.median(value.tokens_per_s for value in values), 1),
        "supervised_per_s": round(statistics.median(value.supervised_per_s for value in values), 1),
        "step_s": round(statistics.median(value.step_s for value in values), 4),
        "start_s": round(statistics.median(value.start_s for value in values), 2),
        "rounds": [round(value.tokens_per_s, 1) for value in values],
        "starts": [round(value.start_s, 2) for value in values],
    }


def table(title: str, found: dict[str, Any], key: str) -> None:
    """Each system's figure, its lowest and highest round, and how many times the figure of each of Muster's it is."""
    print(f"\n{title}")
    rounds = {"tokens_per_s": "rounds", "cpu_s": "rounds", "start_s": "starts"}.get(key)
    own = {name: values[key] for name, values in found.items() if name.startswith("muster")}
    for name, values in found.items():
        every = values[rounds] if rounds else [values[key]]
        text = f"  {name:20s} {values[key]:>10,.4g} ({min(every):,.4g}-{max(every):,.4g})"
        if name not in own:
            text += "".join(f"  {muster} is {figure / values[key]:.3f} x" for muster, figure in own.items())
        print(text, flush=True)


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "tokens": tokens,
    "cpu": cpu,
    "rows": rows,
    "prepare": prepare,
    "checkpoint": checkpoint,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", nargs="*", type=int, choices=(1, 2), default=[1, 2], help="of tokens and cpu")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, one round: does it run?")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds = 1
    result: dict[str, Any] = {"machine": jobs.machine()}
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        bench = Bench(arguments, Path(folder))
        for name in arguments.only:
            before = jobs.machine()["load"][0]
            result[name] = PARTS[name](bench)
            result[name]["load"] = [before, jobs.machine()["load"][0]]
            print(f"  (load average {before} before, {result[name]['load'][1]} after)", flush=True)
            if arguments.json:  # as far as it got
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
