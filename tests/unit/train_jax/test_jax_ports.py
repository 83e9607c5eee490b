"""What JAX's coordinator takes from whom: SECURITY.md says it, and is to be changed when this fails."""

import subprocess
import sys

import pytest

pytest.importorskip("jax")

#: As ``jax.distributed.initialize`` starts it for two processes; a stranger is there before the second one.
COORDINATOR = """
import os, socket, threading
from jax._src.lib import _jax
with socket.create_server(("127.0.0.1", 0)) as free:
    address = "127.0.0.1:%d" % free.getsockname()[1]
service = _jax.get_distributed_runtime_service(address, 2)
first, stranger = (_jax.get_distributed_runtime_client(address, number) for number in range(2))
other = threading.Thread(target=stranger.connect)
other.start()
first.connect()
other.join()
first.key_value_set("key", "mine")
print(stranger.blocking_key_value_get("key", 5000))
stranger.key_value_set("key", "not mine", allow_overwrite=True)
print(first.blocking_key_value_get("key", 5000), flush=True)
os._exit(0)  # no farewell: both clients are one process
"""


def test_the_coordinator_believes_whoever_reaches_it():
    done = subprocess.run([sys.executable, "-c", COORDINATOR], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["mine", "not mine"], done.stderr[-2000:]
