"""The shell line around a host's program, run by a real bash."""

import os
import signal
import subprocess
import sys
import time

import pytest
from cases import placement, spec

from muster.backends.gke.manifests.placement import Options, mode_of
from muster.backends.gke.manifests.pods import SOURCE_AND_RUN, host_template, sourcing, waiting

SAYS = (
    "import os, sys; print(os.environ.get('NCCL_NET'), os.environ.get('NCCL_SOCKET_IFNAME'), sys.argv[1:], os.getpid())"
)
WORDS = ["two words", "$HOME", '"quoted"', "--", "a=b"]


def started(script, overrides=(), program=SAYS):
    argv = sourcing(str(script), dict(overrides), [sys.executable, "-c", program, *WORDS])
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def script(tmp_path):
    return tmp_path / "set env.sh"


def test_it_sources_and_then_becomes_the_agent(script):
    script.write_text("export NCCL_NET=gIB NCCL_SOCKET_IFNAME=lo\n")
    process = started(script, {"NCCL_SOCKET_IFNAME": "eth0,$eth1"})
    said, _ = process.communicate(timeout=30)
    assert said.strip() == f"gIB eth0,$eth1 {WORDS} {process.pid}", "signals reach the agent, not a shell above it"


@pytest.mark.parametrize("text", ["false\n", "shift 2\nset -- x\n", "set -eu\n"])
def test_whatever_the_script_ends_with(script, text):
    script.write_text("export NCCL_NET=gIB\n" + text)
    said, _ = started(script).communicate(timeout=30)
    assert said.startswith(f"gIB None {WORDS}")


def test_a_script_that_comes_late_is_waited_for(script):
    process = started(script)
    time.sleep(1.5)
    assert process.poll() is None
    script.write_text("export NCCL_NET=gIB\n")
    said, complaint = process.communicate(timeout=30)
    assert said.startswith("gIB") and f"waiting for {script}" in complaint


def test_a_script_that_never_comes_ends_the_pod_for_nothing(script):
    argv = sourcing(str(script), {}, ["true"])
    assert "waited < 600" in SOURCE_AND_RUN
    argv[2] = SOURCE_AND_RUN.replace("waited < 600", "waited < 1")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 75 and "did not come in 600 s" in done.stderr


def test_a_pod_that_is_removed_while_it_waits_ends_at_once(script):
    process = started(script)
    assert "waiting" in process.stderr.readline()
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=10) == 75


def test_after_the_script_stands_what_googles_own_recipes_set_again():
    """Not the search path: a script may have put its libraries in front."""
    where = placement(spec("a4-highgpu-8g", "spot"))
    (container,) = host_template(where, mode_of(where))["spec"]["containers"]
    words = container["command"][4:]
    assert words[: words.index("--")] == [
        "NCCL_SOCKET_IFNAME=eth0,eth1", "NCCL_TUNER_CONFIG_PATH=/usr/local/gib/configs/tuner_config_a4.txtpb"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "nccl", "library"),
    [
        ("a3-highgpu-8g", "node", "/usr/local/nvidia/lib64/libnccl-net.so"),
        ("a3-megagpu-8g", "catalogue", "/usr/local/nvidia/lib64/libnccl-net.so"),
        ("a3-ultragpu-8g", "catalogue", "/usr/local/gib/lib64/libnccl-net.so"),
        ("a4-highgpu-8g", "catalogue", "/usr/local/gib/lib64/libnccl-net.so"),
    ],
)
def test_where_nothing_is_sourced_the_plugin_is_waited_for(machine, nccl, library):
    """A rank that starts before the installer has put it there trains over plain sockets, and says nothing."""
    where = placement(spec(machine, "spot"), Options(nccl=nccl))
    (container,) = host_template(where, mode_of(where))["spec"]["containers"]
    assert container["command"][:2] == ["/bin/bash", "-c"] and container["command"][3] == library
    assert any(library.startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"])


@pytest.mark.parametrize("machine", ["g2-standard-48", "a3-highgpu-1g"])
def test_machines_without_a_data_network_wait_for_nothing(machine):
    where = placement(spec(machine, "spot"))
    (container,) = host_template(where, mode_of(where))["spec"]["containers"]
    assert container["command"][0] == "python"


def test_a_library_that_comes_late_is_waited_for_and_not_sourced(tmp_path):
    library = tmp_path / "libnccl-net.so"
    argv = waiting(str(library), [sys.executable, "-c", SAYS, *WORDS])
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert f"waiting for {library}" in process.stderr.readline()
    time.sleep(1.2)
    assert process.poll() is None
    library.write_text("export NCCL_NET=sourced\n")
    said, _ = process.communicate(timeout=30)
    assert said.strip() == f"None None {WORDS} {process.pid}"
