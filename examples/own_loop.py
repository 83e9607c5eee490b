"""A plain DDP loop that survives: started by `command:` in own-loop.yaml, or by torchrun without Muster."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import muster.run as muster

STEPS = 200

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer}

step = muster.restore(state)
while step < STEPS and not muster.should_stop():
    step += 1
    generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
    inputs = torch.randn(64, 32, generator=generator)
    loss = (wrapped(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    muster.save(step, state)
    muster.heartbeat(step, tokens=64 * dist.get_world_size(), loss=loss.item())
    if dist.get_rank() == 0 and step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
muster.finish(step, state)
dist.destroy_process_group()
