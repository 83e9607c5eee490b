"""The loop that a skilled user would write by hand: FSDP2 or DDP, AdamW, clipping, packed random tokens, nothing else.

    torchrun --nproc-per-node 2 bare_loop.py JOB.json        (or with torchrun's variables set by hand)

No checkpoints, no snapshots, no events, no agents, no finiteness check: what it does not do is what it is
measured for. JOB.json: see ``loops/job.py``. Rank 0 writes ``job["out"]``.
"""

import json
import os
import sys
import time
from pathlib import Path

from meeting import meet


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    import torch
    import torch.distributed as dist

    torch.set_num_threads(job["threads"])
    cuda = job["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(job, cuda)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    batches = Batches(job, rank, world, "cuda" if cuda else "cpu")
    ends, losses, spent = [], [], []
    for step in range(job["steps"]):
        rounds = batches.of(step)
        total = torch.zeros((), device=rounds[0].device)
        for number, tokens in enumerate(rounds):
            sync_gradients(model, number == len(rounds) - 1)
            loss = loss_of(model, tokens) / len(rounds)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))  # waits for the device: the step is over
        if rank == 0:
            meet(step + 1)
        ends.append(time.monotonic_ns())
        spent.append(time.process_time_ns())
    if rank == 0:
        peak = torch.cuda.max_memory_allocated() if cuda else None
        found = {"ends_ns": ends, "cpu_ns": spent, "losses": losses, "peak_bytes": peak}
        per_step = job["batch"] * job["sequence_length"]
        found["tokens"] = found["supervised"] = [per_step] * job["steps"]
        with open(job["out"], "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


def build(job, cuda):
    """The model, cut by FSDP layer by layer (``units: layers``, what tutorials do) or as one unit (``whole``); or held
    whole by each rank (``replicated``): DDP, and on one rank nothing around it."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**job["config"])
    frozen = torch.bfloat16 if job["lora_rank"] else torch.float32
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=frozen, attn_implementation="sdpa")
    model.config.use_cache = False
    if job["lora_rank"]:
        from peft import LoraConfig, get_peft_model

        wanted = LoraConfig(r=job["lora_rank"], lora_alpha=32, target_modules="all-linear", lora_dropout=0.0)
        model = get_peft_model(model, wanted, autocast_adapter_dtype=False)
    if job["checkpointing"]:
        model.gradient_checkpointing_enable()
    layers = model.get_base_model().model.layers if job["lora_rank"] else model.model.layers
    if job["compile"]:
        for layer in layers:
            layer.compile()
    if job["units"] == "replicated":
        world = torch.distributed.get_world_size()
        return (model if world == 1 else torch.nn.parallel.DistributedDataParallel(model)).train()
    half = job["dtype"] == "bfloat16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    mesh = init_device_mesh("cuda" if cuda else "cpu", (torch.distributed.get_world_size(),))
    if job["units"] == "layers":
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.train()


def sync_gradients(model, sync):
    """Whether the next backward pass sums gradients over the ranks: that of a step's last micro-batch does."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(sync)
    else:
        model.require_backward_grad_sync = sync  # as DDP's no_sync() does


def loss_of(model, tokens):
    """Mean cross-entropy of the next token; every sequence is one document (plain causal attention)."""
    import torch

    logits = model(input_ids=tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Batches:
    """This rank's micro-batches of each step: int64[micro, sequence_length + 1]."""

    def __init__(self, job, rank, world, device):
        import torch

        self.job, self.rank, self.world, self.device = job, rank, world, device
        shape = (job["distinct"] or 64, job["sequence_length"] + 1)
        self.rows = torch.randint(0, job["config"]["vocab_size"], shape, generator=torch.Generator().manual_seed(0))

    def of(self, step):
        import torch

        batch, micro = self.job["batch"], self.job["micro"]
        mine = range(self.rank * micro, batch, self.world * micro)
        starts = [step * batch + start for start in mine]
        picked = [torch.arange(start, start + micro) % len(self.rows) for start in starts]
        return [self.rows[rows].to(self.device) for rows in picked]


if __name__ == "__main__":
    main()
