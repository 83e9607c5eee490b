"""Ranks for the live checkpoint tests: imports torch once, then forks worlds of ranks as told on stdin.

In: the path of a JSON file; out: the ranks' process ids; in: ``wait``; out: their exit codes.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from muster.checkpoint.load import load_into, newest_valid
from muster.checkpoint.saver import Saver
from muster.core.types import Layout
from muster.storage.store import open_store

#: Sizes that 2, 3, 4 and 5 ranks do not divide, a dimension smaller than the ranks, a scalar, an odd dtype.
SHAPES = {
    "model.embed.weight": (37, 16),
    "model.layer.weight": (64, 24),
    "model.norm.weight": (3,),
    "model.half.weight": (16, 10),
}


def whole(step):
    """The state of ``step`` as plain tensors: a function of (step, name)."""
    found = {}
    for number, (name, shape) in enumerate(sorted(SHAPES.items())):
        generator = torch.Generator().manual_seed(1000 * step + number)
        dtype = torch.bfloat16 if "half" in name else torch.float32
        found[name] = torch.randn(shape, generator=generator).to(dtype)
        found[f"optimizer.exp_avg.{name.removeprefix('model.')}"] = torch.randn(shape, generator=generator)
    found["model.scale"] = torch.tensor(float(step))
    return found


def placed(tensors, mesh, layout):
    """The same tensors on the mesh, as the trainer lays them out."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            found[name] = tensor
        elif layout == "fsdp":
            found[name] = distribute_tensor(tensor, mesh, [Shard(0)])
        elif layout == "2d":
            across = Shard(1) if tensor.dim() > 1 else Replicate()
            found[name] = distribute_tensor(tensor, mesh, [Shard(0), across])
        else:
            found[name] = distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])
    return found


def sha256(state):
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        digest.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(told, rank):
    size = told["ranks"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{told['meeting']}", rank=rank, world_size=size)
    group = dist.new_group(backend="gloo")
    layout = told.get("layout", "fsdp")
    mesh = init_device_mesh("cpu", (size,) if layout == "fsdp" else (size // 2, 2))
    out = {"events": [], "skipped": []}
    store = open_store()
    if told["do"] == "load":
        state = placed({name: torch.zeros_like(t) for name, t in whole(0).items()}, mesh, layout)
        manifest = newest_valid(
            store, told["directory"], lambda *what: out["skipped"].append(what), state=state, group=group
        )
        out["step"] = manifest.step if manifest else None
        if manifest:
            load_into(manifest, state)
            out["sha256"] = sha256(state)
    else:
        saver = Saver(
            told["directory"],
            run_id="live",
            attempt=told["attempt"],
            layout=Layout(dp_shard=size),
            keep_last=told.get("keep_last", 2),
            asynchronous=True,
            group=group,
            store=store,
            on_event=lambda kind, **detail: out["events"].append([kind, detail]),
        )
        for step in told["steps"]:
            state = placed(whole(step), mesh, layout)
            saver.prepare(state)
            if rank == told.get("late") and step == told["steps"][-1]:
                time.sleep(60)  # the others write, and wait for this one before they commit
            saver.save(step, state, {"step": step})
            with torch.no_grad():
                for tensor in state.values():  # training goes on at once, and may not be seen in the file
                    (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1)
            if step == told.get("waits", {}).get("after"):
                saver.finish()
                while not Path(told["waits"]["for"]).exists():
                    time.sleep(0.005)
        saver.finish()
        out["sha256"] = sha256(whole(told["steps"][-1]))
    Path(told["answers"], f"{rank}.json").write_text(json.dumps(out))
    dist.barrier(group)
    dist.destroy_process_group()


def main():
    while line := sys.stdin.readline():
        told = json.loads(Path(line.strip()).read_text())
        pids = []
        for rank in range(told["ranks"]):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    run(told, rank)
                    code = 0
                except BaseException:  # noqa: BLE001 (a process's edge)
                    Path(told["answers"], f"{rank}.log").write_text(traceback.format_exc())
                os._exit(code)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        assert sys.stdin.readline().strip() == "wait"
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


if __name__ == "__main__":
    main()
