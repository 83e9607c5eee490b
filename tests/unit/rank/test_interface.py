"""gloo listens where it is told to, or the user is told where it would."""

import os
import subprocess
import sys

import pytest

from muster.core.errors import UsageError
from muster.rank import interface
from muster.rank.interface import interface_addresses, interface_for, interface_of, variables

KNOWN = [
    ("lo", "127.0.0.1"),
    ("eth0", "10.0.0.5"),
    ("eth0", "10.0.0.6"),
    ("lo", "::1"),
    ("eth0", "fd00::5"),
    ("six", "fd00::6"),
]


@pytest.mark.parametrize(
    ("address", "name"),
    [("127.0.0.1", "lo"), ("10.0.0.5", "eth0"), ("fd00::6", "six"), ("fd00:0::0:6", "six")],
)
def test_the_interface_whose_first_address_it_is(address, name):
    assert interface_of(address, KNOWN) == name


@pytest.mark.parametrize(
    ("address", "sentence", "hint"),
    [
        ("10.0.0.6", "would listen on 10.0.0.5 instead of 10.0.0.6: it takes the first address of eth0", "=10.0.0.5"),
        ("::1", "would listen on 127.0.0.1 instead of ::1", "GLOO_SOCKET_IFNAME=lo to accept it"),
        ("fd00::5", "would listen on 10.0.0.5 instead of fd00::5", "eth0"),
        ("127.0.0.2", "cannot listen on 127.0.0.2: no network interface", "127.0.0.1 (lo)"),
        ("0.0.0.0", "no network interface of this machine has that address", "10.0.0.5 (eth0)"),
    ],
)
def test_where_gloo_would_take_another_address_it_is_named(address, sentence, hint):
    with pytest.raises(UsageError) as raised:
        interface_of(address, KNOWN)
    assert sentence in str(raised.value) and hint in str(raised.value.hint)


def test_nccl_is_told_the_same_unless_somebody_has_told_it(monkeypatch):
    monkeypatch.setattr(interface, "interface_addresses", lambda: iter(KNOWN))
    assert variables("127.0.0.1", named=()) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert variables("10.0.0.5", named=()) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert variables("10.0.0.5", named=["NCCL_NET", "PATH"]) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert variables("127.0.0.1", named=["NCCL_SOCKET_IFNAME"]) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert variables("127.0.0.1", named=["GLOO_SOCKET_IFNAME"]) == {}


def test_a_hosts_name_is_looked_up(monkeypatch):
    monkeypatch.setattr(interface, "interface_addresses", lambda: iter(KNOWN))
    monkeypatch.setattr(interface.socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("10.0.0.5", 0))])
    assert interface_for("node-5") == "eth0"


GLOO = """
import sys, torch.distributed as dist, socket, os
device = dist.ProcessGroupGloo.create_device(interface=sys.argv[1])
held = {f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
inodes = {os.readlink(path) for path in held if os.path.islink(path)}
for line in open("/proc/self/net/tcp").readlines()[1:]:
    words = line.split()
    if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
        print(socket.inet_ntoa(bytes.fromhex(words[1].split(":")[0])[::-1]))
"""


def test_gloo_takes_the_first_address_of_an_interface_as_we_read_them():
    pytest.importorskip("torch")
    first = dict(reversed(list(interface_addresses())))
    done = subprocess.run([sys.executable, "-c", GLOO, "lo"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [first["lo"]]


def test_a_fork_server_ends_with_the_sentence(tmp_path):
    token = tmp_path / "token"
    token.write_text("k" * 64)
    token.chmod(0o600)
    environ = {key: value for key, value in os.environ.items() if key != interface.VARIABLE}
    argv = ["--run-dir", str(tmp_path), "--agent-socket", "none", "--bind", "192.0.2.77"]
    done = subprocess.run(
        [sys.executable, "-m", "muster.rank.fork_server", *argv], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: gloo cannot listen on 192.0.2.77: no network interface")


def test_an_interface_that_the_user_names_is_not_looked_at(tmp_path):
    """It goes on, to the run file that is not there."""
    (tmp_path / "token").write_text("k" * 64)
    (tmp_path / "token").chmod(0o600)
    argv = ["--run-dir", str(tmp_path), "--agent-socket", "none", "--bind", "192.0.2.77"]
    done = subprocess.run(
        [sys.executable, "-m", "muster.rank.fork_server", *argv], capture_output=True, text=True,
        env={**os.environ, interface.VARIABLE: "mine"},
    )  # fmt: skip
    assert "gloo" not in done.stderr and "resolved.json" in done.stderr
