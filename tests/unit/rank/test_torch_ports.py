"""What torch's own listeners take from whom: SECURITY.md says it, and is to be changed when this fails."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

#: As ``rank.fork_server`` serves it, and a stranger.
STORE = """
import socket
from torch._C._distributed_c10d import TCPStore
listener = socket.create_server(("127.0.0.1", 0))
host, port = listener.getsockname()
store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.fileno())
store.set("a1/rank0", "mine")
stranger = TCPStore(host, port, None, False)
print(stranger.get("a1/rank0").decode())
stranger.set("a1/rank0", "not mine")
print(store.get("a1/rank0").decode())
"""


def test_the_rendezvous_store_believes_whoever_reaches_it():
    done = subprocess.run([sys.executable, "-c", STORE], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["mine", "not mine"]
