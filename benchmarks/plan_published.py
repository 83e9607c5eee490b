"""`muster plan` against published runs, through run files: refusals with their reasons, memory, tokens/s; and layouts
that are known not to fit. The tables of docs/explanation/plan.md.

python benchmarks/plan_published.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from ruamel.yaml import YAML

from muster.app.planning.plan import Planned, plan
from muster.core.errors import MusterError
from muster.core.typed_json import JsonObject

TABLE = Path(__file__).with_name("published_runs.yaml")
GIB = 1 << 30
#: Of a memory estimate, what torch does not count.
NOT_TORCHS = ("context", "communicators", "standby")
#: A vocabulary of 50,368 and positions as long as the sequence (MPT), or of 51,200 (Megatron's GPT).
MPT_VOCABULARY, GPT_VOCABULARY = 50_368, 51_200


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published run and what the plan says of it."""

    name: str
    source: str
    use: str
    tokens: float | None
    gib: dict[str, float] | None
    planned_tokens: float | None = None
    planned_gib: float | None = None
    refused: str | None = None

    @property
    def time_error(self) -> float | None:
        return None if not self.tokens or not self.planned_tokens else self.planned_tokens / self.tokens - 1

    @property
    def memory_error(self) -> float | None:
        return None if not self.gib or not self.planned_gib else self.planned_gib / next(iter(self.gib.values())) - 1


@cache
def table() -> Any:
    return YAML(typ="safe").load(TABLE.read_text(encoding="utf-8"))


@cache
def runs() -> tuple[Published, ...]:
    """Every row of the table, planned."""
    result = []
    for row in table()["rows"]:
        name, source, use, gpu, hosts, model, length, batch, micro, kind, compiled, precision, layout, *rest = row
        tokens, gib, more = rest
        settings = {
            "training.compile": compiled, "training.precision": precision, **more,
        }  # fmt: skip
        planned = _plan(gpu, hosts, model, length, batch, micro, kind, layout, settings)
        known = {"name": name, "source": source, "use": use, "tokens": tokens, "gib": gib}
        if isinstance(planned, str):
            result.append(Published(**known, refused=planned))
            continue
        chosen = planned.chosen
        items = {key: value for key, value in chosen.memory.items.items() if key not in NOT_TORCHS}
        if gib and "peak" in gib:
            del items["allocator"]
        result.append(
            Published(
                **known, planned_gib=sum(items.values()) / GIB,
                planned_tokens=planned.work.tokens_per_step / chosen.time.seconds / chosen.gpus,
            )
        )  # fmt: skip
    return tuple(result)


@cache
def promised() -> tuple[str, ...]:
    """Reports of layouts that ran out of memory and that the plan would take."""
    result = []
    for gpu, hosts, model, length, batch, micro, kind, layout, more, report in table()["too_large"]:
        planned = _plan(gpu, hosts, model, length, batch, micro, kind, layout, {"training.compile": False, **more})
        if not isinstance(planned, str):
            result.append(report)
        elif " needs " not in planned:
            result.append(f"{report}: refused for another reason: {planned}")
    return tuple(result)


def _plan(
    gpu: str, hosts: int, model: str | list[Any], length: int, batch: int, micro: int, kind: str, layout: JsonObject,
    more: JsonObject,
) -> Planned | str:  # fmt: skip
    """The plan, or why there is none."""
    content = json.loads(json.dumps(table()["base"]))
    content["model"] = {"dtype": "bfloat16", **_model(model, length)}
    content["training"] |= {
        "sequence_length": length, "global_batch_size": batch, "micro_batch_size": micro,
        "activation_checkpointing": kind,
    }  # fmt: skip
    content["parallelism"] = layout
    content["resources"] |= {"hosts": hosts, **table()["machines"][gpu]}
    for key, value in more.items():
        section, _, name = key.partition(".")
        content[section][name] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(json.dumps(content), encoding="utf-8")
        try:
            return plan(path, home=Path(folder), environment=False)
        except MusterError as error:
            return str(error).replace(f"{path}:", "").removeprefix("1: ")


def _model(model: str | list[Any], length: int) -> JsonObject:
    if isinstance(model, str):
        return {"source": model if "/" in model else f"meta-llama/{model}"}
    layers, hidden, heads, *llama = model
    config: JsonObject = {
        "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": MPT_VOCABULARY,
        "n_positions": length,
    }  # fmt: skip
    if llama:  # Megatron's GPT: a gated MLP of 8/3 has as many parameters as its own of 4
        config = {
            "model_type": "llama", "tie_word_embeddings": False, "num_hidden_layers": layers, "hidden_size": hidden,
            "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": hidden * 8 // 3,
            "vocab_size": GPT_VOCABULARY,
        }  # fmt: skip
    return {"config": config, "tokenizer": "gpt2"}


def errors(of: Sequence[Published], use: str | None = None) -> list[float]:
    """Absolute errors of time."""
    return [abs(each.time_error) for each in of if each.time_error is not None and use in (None, each.use)]


def markdown() -> str:
    """The tables of docs/explanation/plan.md: rows in sight of which constants were chosen, blind ones, what is not
    planned."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    sources = table()["sources"]
    for use, title in (("fit", "in sight"), ("blind", "blind")):
        yield f"| run ({title}) | published tokens/s/GPU | planned | error | GiB published | planned | error |"
        yield "|---|---|---|---|---|---|---|"
        for each in (each for each in runs() if each.use == use and not each.refused):
            tokens = (
                f"{each.tokens:,} | {each.planned_tokens:,.0f} | {each.time_error:+.1%}" if each.tokens else "- | - | -"
            )
            held = next(iter(each.gib.values())) if each.gib else None
            memory = f"{held} | {each.planned_gib:.1f} | {each.memory_error:+.1%}" if held else "- | - | -"
            yield f"| {each.name} | {tokens} | {memory} |"
        of = errors(runs(), use)
        yield ""
        yield f"{len(of)} rows {title}: median error {median(of):.1%}, worst {max(of):.1%}."
        yield ""
    yield "| not planned | why |"
    yield "|---|---|"
    for each in (each for each in runs() if each.refused):
        yield f"| {each.name} | {each.refused} |"
    yield ""
    yield "Median error of the rows of one source, and of all others:"
    yield ""
    for key, source in sources.items():
        mine, others = ([each for each in runs() if (each.source == key) is same] for same in (True, False))
        if errors(mine):
            shares = f"{median(errors(mine)):.1%} of {len(errors(mine))}; the others {median(errors(others)):.1%}"
            yield f"* {source}: {shares}"
    yield ""
    number = len(table()["too_large"])
    yield f"Of {number} layouts that were reported to run out of memory {len(promised())} are promised."


if __name__ == "__main__":
    print(markdown())
