"""Eight virtual devices, asked for before JAX opens any, and a torch world of one rank."""

import jax
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

# Not by XLA_FLAGS: what other tests start from here would inherit it.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")


@pytest.fixture
def world_of_one():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)
