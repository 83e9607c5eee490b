"""``muster plan --trace``: the closed form of memory against the real model on fake tensors, in its own process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from muster.app.planning.plan import Planned
from muster.config import load
from muster.core.clock import SystemShell
from muster.core.errors import BackendError, UsageError, install_command
from muster.core.protocols import Shell
from muster.core.typed_json import JsonObject
from muster.plan.memory import DeviceOverhead, memory
from muster.plan.plan_file import settings_as_overrides

TIMEOUT_S = 900.0
#: The trace counts tensors alone, with the attention kernel of a CPU.
BARE = DeviceOverhead(context_bytes=0, communicator_bytes=0, fragmentation=0.0, expanded_kv=True, streams=False)
#: Between closed form and trace; beyond it one of them is wrong.
TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The closed form compared with the trace: bytes of tensors on one rank."""

    closed_form_bytes: int
    closed_form_by_item: Mapping[str, int]
    trace_bytes: int
    trace_by_kind: JsonObject
    trace_moment: str
    difference: float
    within_tolerance: bool
    seconds: float


def compare(planned: Planned, *, shell: Shell | None = None) -> Compared:
    """Trace the chosen plan's rank 0 and compare it with the closed form.

    Raises:
        UsageError: the plan has stages.
        BackendError: the trace failed, for instance because torch is not installed.
    """
    plan, setting = planned.plan, planned.chosen.setting
    if setting.layout.pp > 1:
        text = f"--trace runs one rank, and a stage of a pipeline (pp {setting.layout.pp}) does not run alone"
        raise UsageError(text, hint="parallelism.pp=1, or leave out --trace")
    keys = ("training.", "parallelism.")
    settings = {key: value for key, value in plan.settings.items() if key.startswith(keys)}
    overrides = [*plan.overrides, *settings_as_overrides(settings)]
    spec = load.loads(plan.run_text, overrides, source=plan.run_file, environment=False, to_plan=True).spec
    shape = planned.work.shape
    request = {
        "spec": spec.model_dump(mode="json"),
        "layout": dict(plan.chosen.layout),
        "vocab_size": shape.vocab,
        "config": config_of(planned),
    }
    done = (shell or SystemShell()).run(
        [sys.executable, "-P", "-m", "muster.train.memory_trace"],
        env={"OMP_NUM_THREADS": "1"},
        stdin=json.dumps(request),
        timeout_s=TIMEOUT_S,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BackendError(f"the memory trace failed: {last}", hint=f"it needs torch: {install_command('train')}")
    result = json.loads(done.stdout)
    closed = memory(planned.work, setting, BARE)
    difference = closed.total_bytes / result["peak_bytes"] - 1
    return Compared(
        closed_form_bytes=closed.total_bytes,
        closed_form_by_item=dict(closed.items),
        trace_bytes=result["peak_bytes"],
        trace_by_kind=result["kinds"],
        trace_moment=result["moment"],
        difference=difference,
        within_tolerance=abs(difference) <= TOLERANCE,
        seconds=result["seconds"],
    )


def config_of(planned: Planned) -> JsonObject:
    """A transformers config with the plan's shape: the trace needs no hub either."""
    shape = planned.work.shape
    return {
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": max(planned.work.sequence_length, 2048),
    }
