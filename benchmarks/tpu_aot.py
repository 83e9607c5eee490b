"""A training step of the JAX trainer compiled for a TPU slice on a machine without one, and its HBM beside the plan's.

What a chip needs is XLA's buffer assignment: arguments and one heap, by which it refuses a program that does not fit
("the total memory required for HLO temporaries (17.27G) exceeds available HBM (15.75G)"). `memory_analysis` has no such
figure: its temporary memory is up to half as much again, its peak leaves out what lies unused between buffers.

Needs the libtpu that this jax pins, in an environment of its own (`python -m venv aot`, then
`aot/bin/pip install '.[train,tpu]' 'libtpu==0.0.42.*'` for jax 0.10.2), and one program at a time. Minutes; not in CI.

python benchmarks/tpu_aot.py [--model meta-llama/Llama-3.2-1B] [--slice v5e:2x4] [--length 2048] [--checkpointing full]
    [--tp 1] [--rounds 1]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "DUMP": tempfile.mkdtemp(prefix="tpu-aot-")}
os.environ["XLA_FLAGS"] = f"--xla_dump_to={os.environ['DUMP']} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_step"

import jax
import jax.numpy as jnp
import torch
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from transformers import AutoConfig, AutoModelForCausalLM

from muster.catalog import rows
from muster.config import load
from muster.core.layout import Layout
from muster.plan.tpu_memory import tpu_memory
from muster.plan.workload import Setting, workload
from muster.train_jax.arrays import leaves_of
from muster.train_jax.batches import KEYS
from muster.train_jax.components import decays_of, model_of
from muster.train_jax.host_model import HostModel
from muster.train_jax.layout import ROWS, mesh_of
from muster.train_jax.model import Parameters
from muster.train_jax.step import Scalars, State, make_step

RUN = """
name: aot
model: {source: MODEL}
data: {sources: [{type: random, rows: 1000}]}
training: {steps: 1, sequence_length: LENGTH, global_batch_size: CHIPS, activation_checkpointing: KIND}
resources: {device: tpu}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="meta-llama/Llama-3.2-1B")
    parser.add_argument("--slice", default="v5e:2x4")
    parser.add_argument("--length", default=2048, type=int)
    parser.add_argument("--checkpointing", default="full")
    parser.add_argument("--tp", default=1, type=int)
    parser.add_argument("--rounds", default=1, type=int, help="micro-batches of a step")
    parser.add_argument("--program", type=Path, help="where the compiled program's text goes, to be read")
    parser.add_argument("--option", action="append", default=[], help="of the compiler: NAME=VALUE; may be repeated")
    given = parser.parse_args()
    topology = topologies.get_topology_desc(platform="tpu", topology_name=given.slice)
    mesh = mesh_of(topology.devices, tp=given.tp)
    groups = mesh.size // given.tp
    text = RUN.replace("MODEL", given.model).replace("LENGTH", str(given.length))
    text = text.replace("CHIPS", str(groups * given.rounds))
    spec = load.loads(text.replace("KIND", given.checkpointing), environment=False).spec

    config = AutoConfig.for_model(**rows.table("models.yaml")["models"][given.model]["config"])
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module.model.rotary_emb = type(module.model.rotary_emb)(config)  # its frequencies are read: not on meta
    model = model_of(spec, HostModel(module, config, None), mesh)
    assert model.splash_over is not None
    named = dict(module.named_parameters())
    leaves = leaves_of(named, mesh)
    arrays = Parameters({}, {})
    for leaf in leaves:
        shape = jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
        (arrays.layers if leaf.stacked else arrays.top)[leaf.key] = shape
    state = State(arrays, arrays, arrays)
    decays = decays_of(leaves, {name: value.ndim > 1 for name, value in named.items()})
    step = make_step(model, spec.training.optimizer, decays, chunk_tokens=spec.training.loss_chunk_tokens, state=state)

    lain = NamedSharding(mesh, PartitionSpec(None, ROWS))
    batch = {key: jax.ShapeDtypeStruct((given.rounds, groups, given.length), jnp.int32, sharding=lain) for key in KEYS}
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    began = time.monotonic()
    lowered = step.lower(state, Parameters({}, {}), batch, Scalars(number, number, number, number))  # type: ignore[attr-defined]
    compiled = lowered.compile(compiler_options=dict(option.split("=", 1) for option in given.option))
    took = time.monotonic() - began
    found = compiled.memory_analysis()
    program = compiled.as_text()
    if given.program is not None:
        given.program.write_text(program)
    work = workload(spec, rows.models()[given.model].shape)
    setting = Setting(
        layout=Layout(dp_shard=groups, tp=given.tp),
        micro_batch_size=1,
        activation_checkpointing=given.checkpointing,
    )
    planned = tpu_memory(work, setting)

    mesh_text = f"{groups} x tp {given.tp} chips"
    print(f"{given.model}, {given.slice} ({mesh_text}), {given.length} tokens a group, {given.checkpointing}")
    print(f"jax {jax.__version__}, compiled in {took:.0f} s")
    dump = Path(os.environ["DUMP"])
    (report,) = dump.glob("*memory-usage-report.txt")
    allocated = int(re.search(r"default \(color=0\)\nTotal bytes: (\d+)", report.read_text())[1])  # type: ignore[index]
    shutil.rmtree(dump)
    state_bytes, runtime = found.argument_size_in_bytes, planned.items["runtime"]
    without = planned.total_bytes - runtime
    print(f"XLA allocates {allocated / 1e9:.2f} GB a chip, of which arguments {state_bytes / 1e9:.2f} GB")
    print(f"planned {without / 1e9:.2f} GB ({without / allocated - 1:+.1%}), the peak at: {planned.moment}; besides")
    print(f"{runtime / 1e9:.0f} GB for the runtime:")
    for name, count in planned.items.items():
        print(f"  {name:<20} {count / 1e9:6.2f} GB")
    for name in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
        print(f"  {name:<20} {program.count(f' {name}(') + program.count(f' {name}-start('):>4}")
    # XLA for TPUs may fuse a reduce-scatter, which then has this name alone.
    print(f"  {'all-reduce-scatter':<20} {program.count('%all-reduce-scatter'):>4}")
    print(f"  {'kernels':<20} {program.count('tpu_custom_call'):>4}")


if __name__ == "__main__":
    main()
