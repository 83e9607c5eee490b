"""The training process that the peers keep alive: a Llama-shaped model in plain torch, runs in the peer's environment.

    recovery_worker.py plain|nvrx|torchft FOLDER [--timeout S] [--replica N] [--store-port P] [--steps-log FILE]

Same shape and the same work a step as ``benchmarks/recovery.py`` gives Muster: hidden 256, 4 layers, 2048 tokens'
vocabulary, 12 sequences of BENCH_LENGTH (128) tokens a step in micro-batches of 2, shared out over the ranks. Every
process appends ``step monotonic_ns`` to ``FOLDER/steps-<name>``, and its place to ``FOLDER/ranks``.

Granted to the launchers: the whole state is written to /dev/shm at every step, and read back by all ranks after a
restart, so that no more than the step under way is lost.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

HIDDEN, LAYERS, HEADS, INNER, VOCABULARY, BATCH, MICRO = 256, 4, 4, 688, 2048, 12, 2
LENGTH = int(os.environ.get("BENCH_LENGTH", "128"))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, HIDDEN))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def make_model():
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), *layers, nn.RMSNorm(HIDDEN), head)


def micro_batches(step, rank, world):
    made = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=made)
    rounds = list(tokens.split(MICRO))
    return rounds[rank::world] or rounds[:1]


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def backward(model, step, rank, world):
    rounds = micro_batches(step, rank, world)
    for number, tokens in enumerate(rounds):
        if number + 1 < len(rounds):
            with model.no_sync():
                (loss_of(model, tokens) / len(rounds)).backward()
        else:
            (loss_of(model, tokens) / len(rounds)).backward()


def note(path, *words):
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


def plain(arguments):
    """DDP under a launcher (torchrun, ft_launcher), restarted from /dev/shm."""
    limit = {"timeout": timedelta(seconds=arguments.timeout)} if arguments.timeout else {}
    dist.init_process_group("gloo", **limit)
    rank, world = dist.get_rank(), dist.get_world_size()
    client = None
    if arguments.mode == "nvrx":
        from nvidia_resiliency_ext import fault_tolerance

        client = fault_tolerance.RankMonitorClient()
        client.init_workload_monitoring()
    model = make_model()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    state, step = arguments.folder + "/state.pt", 0
    if os.path.exists(state):
        found = torch.load(state, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["step"]
    note(arguments.folder + "/ranks", rank, os.getpid(), os.getppid(), world)
    while True:
        step += 1
        backward(ddp, step, rank, world)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if client is not None:
            client.send_heartbeat()
        if rank == 0:
            note(arguments.folder + "/steps-rank0", step, time.monotonic_ns())
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(kept, state + ".new")
            os.replace(state + ".new", state)


def torchft(arguments):
    """A replica group of one rank under torchft's manager: a lost one is left behind, the others go on."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", arguments.store_port, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=arguments.timeout or 60)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), load_state_dict=load, min_replica_size=1, timeout=limit, rank=0,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()}, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, replica_id=f"replica-{arguments.replica}-", hostname="127.0.0.1",
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    note(arguments.folder + "/ranks", arguments.replica, os.getpid(), os.getppid(), 2)
    while True:
        optimizer.zero_grad()  # starts the quorum
        before = manager.current_step()
        world = max(1, manager.num_participants())
        backward(ddp, before + 1, arguments.replica % world, world)
        optimizer.step()
        if manager.current_step() > before:
            name = f"/steps-replica{arguments.replica}"
            note(arguments.folder + name, manager.current_step(), time.monotonic_ns(), manager.num_participants())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["plain", "nvrx", "torchft"])
    parser.add_argument("folder")
    parser.add_argument("--timeout", type=float, default=0.0)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--store-port", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (torchft if arguments.mode == "torchft" else plain)(arguments)


if __name__ == "__main__":
    main()
