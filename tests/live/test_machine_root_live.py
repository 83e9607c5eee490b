"""A machine of namespaces runs its start-up script as root, with the metadata server where it always is."""

import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import pytest
from fakes.compute_engine.machine_root import METADATA, PYTHONS, MachineRoot
from fakes.metadata import change, token

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip"))),
        reason="namespaces need root, unshare and ip",
    ),
]

SCRIPT = """#!/bin/bash
echo "user $(id -u) process $$"
echo boot >> /var/lib/boots
fetch() {
  exec 3<>/dev/tcp/metadata.google.internal/80
  printf 'GET /computeMetadata/v1/instance/%s HTTP/1.0\\r\\nMetadata-Flavor: Google\\r\\n\\r\\n' "$1" >&3
  tail -n 1 <&3
}
echo "name $(fetch name)"
(exec 3<>/dev/tcp/1.1.1.1/443) 2>/dev/null && echo "internet" || echo "no internet"
for each in python3.11 python3.12 python3.13; do $each -c 'print("python")' 2>/dev/null; done
(while sleep 0.2; do echo alive > /var/lib/alive; done) >/dev/null 2>&1 </dev/null &
echo "end of boot $(wc -l < /var/lib/boots)"
exit 7
"""


@pytest.fixture
def machine():
    folder = Path(tempfile.mkdtemp(prefix="machine-", dir="/dev/shm"))
    made = MachineRoot(folder, {"name": "h0", "attributes/startup-script": SCRIPT, **token()}, PYTHONS)
    yield made
    made.power_off()
    shutil.rmtree(folder, ignore_errors=True)


def until(found, patience_s=60):
    ends = time.monotonic() + patience_s
    while not found():
        assert time.monotonic() < ends
        time.sleep(0.05)


def finished(machine, boots):
    until(lambda: machine.serial().count("Finished running startup scripts.") == boots)
    return machine.serial().rpartition("Found startup-script in metadata.")[2]


def test_boot_reboot_and_replace(machine):
    machine.boot()
    said = finished(machine, 1)
    assert "user 0 process " in said and "name h0" in said
    assert "no internet" in said and "startup-script: python" not in said
    assert 'Script "startup-script" failed with error: exit status 7' in said
    alive = machine.disk / "var/lib/alive"
    until(alive.exists)  # what it left running goes on

    with machine.inside(lambda: socket.create_server(("127.0.0.1", 0))) as server:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.getsockname(), timeout=1)  # another network's
    with machine.inside(lambda: socket.create_connection((METADATA, 80), timeout=10)) as line:
        assert line.getpeername() == (METADATA, 80)

    change(machine.server, "name", "h0-again")
    machine.reboot()
    said = finished(machine, 2)
    assert "name h0-again" in said and "end of boot 2" in said

    machine.power_off()
    alive.unlink(missing_ok=True)
    time.sleep(1)
    assert not alive.exists()  # nothing of it is left

    machine.replace()
    assert "end of boot 1" in finished(machine, 3)
    assert not Path("/var/lib/boots").exists()  # nothing was written outside
