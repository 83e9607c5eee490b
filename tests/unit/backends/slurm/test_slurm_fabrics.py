"""NCCL on Google's Slurm images: Google's script first, what Google's own jobs set after it, the user's word last."""

import dataclasses
import subprocess

import pytest
from slurm_cases import spec

from muster.backends.slurm import nccl_settings
from muster.backends.slurm.nccl_settings import fabric_mounts, with_nccl_settings
from muster.catalog import gke
from muster.catalog.slurm import slurm_fabric, slurm_fabrics
from muster.core.errors import UsageError

JOB = {"SLURM_JOB_ID": "41"}
#: What the Toolkit's own jobs export after Google's script (v1.95.0): run-nccl-tests.sh of a3-megagpu-8g and
#: a3-ultragpu-8g, run-nccl-tests-via-ramble.sh of a4-highgpu-8g, and the folder they put before LD_LIBRARY_PATH.
GOOGLES = {
    "a3-megagpu-8g": ("/var/lib/tcpxo/lib64", {
        "NCCL_FASTRAK_CTRL_DEV": "enp0s12",
        "NCCL_FASTRAK_IFNAME": "enp6s0,enp7s0,enp13s0,enp14s0,enp134s0,enp135s0,enp141s0,enp142s0",
        "NCCL_SOCKET_IFNAME": "enp0s12",
        "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
    }),
    "a3-ultragpu-8g": ("/usr/local/gib/lib64", {"NCCL_NET": "gIB", "NCCL_SOCKET_IFNAME": "enp0s19,enp192s20"}),
    "a4-highgpu-8g": ("/usr/local/gib/lib64", {"NCCL_NET": "gIB", "NCCL_SOCKET_IFNAME": "enp0s19,enp192s20"}),
}  # fmt: skip


def with_script(monkeypatch, tmp_path, machine, text):
    """The machine's fabric, with a script of ours in Google's place; the agent prints its variables."""
    path = tmp_path / "env.sh"
    path.write_text(text)
    found = slurm_fabric(machine)
    monkeypatch.setattr(nccl_settings, "slurm_fabric", lambda _: dataclasses.replace(found, script=str(path)))


def what_the_agent_sees(of, environ=None):
    argv, variables = with_nccl_settings(of, ["env", "-0"], {**JOB, **(environ or {})})
    done = subprocess.run(
        argv, env={"PATH": "/usr/bin:/bin", **(environ or {}), **variables}, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)


#: Google's scripts name interfaces of pods, clear what they like, and end with a test that is false.
SCRIPT = """\
set -e
[ $# = 0 ] || exit 9
export NCCL_SOCKET_IFNAME=eth0 NCCL_FASTRAK_IFNAME=eth1 NCCL_DEBUG=VERSION NCCL_FROM_SCRIPT=$NCCL_LIB_DIR.
set +e
[ -n "" ]
"""


@pytest.mark.parametrize("machine", GOOGLES)
def test_what_google_sets_after_its_script_is_what_the_agent_gets(monkeypatch, tmp_path, machine):
    folder, wanted = GOOGLES[machine]
    with_script(monkeypatch, tmp_path, machine, SCRIPT)
    seen = what_the_agent_sees(spec(machine=machine), {"LD_LIBRARY_PATH": "/opt/mine"})
    assert {name: seen[name] for name in wanted} == wanted
    assert seen["LD_LIBRARY_PATH"] == f"{folder}:/opt/mine"
    assert seen["NCCL_FROM_SCRIPT"] == ("/var/lib/tcpxo/lib64." if machine == "a3-megagpu-8g" else ".")
    assert what_the_agent_sees(spec(machine=machine))["LD_LIBRARY_PATH"] == folder, (
        "no empty entry: the folder it is in"
    )


def test_the_users_own_word_is_the_last(monkeypatch, tmp_path):
    with_script(monkeypatch, tmp_path, "a4-highgpu-8g", SCRIPT)
    own = {"environment": {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "enp0s19", "OTHER": "1"}}
    seen = what_the_agent_sees(spec(own, machine="a4-highgpu-8g"))
    assert (seen["NCCL_DEBUG"], seen["NCCL_SOCKET_IFNAME"]) == ("INFO", "enp0s19")
    assert "OTHER" not in seen, "the step has it already"


def test_several_hosts_without_a_plugin_are_refused_rather_than_slow():
    for machine in ("a3-highgpu-8g", "a3-megagpu-8g", "a4-highgpu-8g"):
        with pytest.raises(
            UsageError, match=rf"no NCCL plugin for {machine}: neither /\S+ nor LD_LIBRARY_PATH"
        ) as told:
            with_nccl_settings(spec(machine=machine), ["agent"], JOB)
        assert "slurm.nccl: none" in told.value.hint
    boxed = spec({"container": {"image": "nvcr.io#nvidia/pytorch:1"}}, machine="a4-highgpu-8g")
    with pytest.raises(UsageError, match=r"slurm\.container\.mount_fabric"):
        with_nccl_settings(boxed, ["agent"], JOB)


def test_one_host_needs_no_fabric():
    for machine in ("a3-highgpu-8g", "a3-megagpu-8g", "a4-highgpu-8g"):
        assert with_nccl_settings(spec(machine=machine, hosts=1), ["agent"], JOB) == (["agent"], {})


def test_a_plugin_elsewhere_is_known_by_googles_script_beside_it(tmp_path):
    """An image may bring its own; another vendor's plugin has the same file name, and is not taken for it."""
    folders = {name: tmp_path / name / "lib64" for name in ("hpcx", "gib")}
    for folder in folders.values():
        folder.mkdir(parents=True)
        (folder / "libnccl-net.so").touch()
    environ = {**JOB, "LD_LIBRARY_PATH": ":".join(map(str, folders.values()))}
    with pytest.raises(UsageError, match="no NCCL plugin"):
        with_nccl_settings(spec(machine="a4-highgpu-8g"), ["agent"], environ)
    (tmp_path / "gib" / "scripts").mkdir()
    (tmp_path / "gib" / "scripts" / "set_nccl_env.sh").write_text("export NCCL_FROM_SCRIPT=1\n")
    seen = what_the_agent_sees(spec(machine="a4-highgpu-8g"), environ)
    assert seen["NCCL_FROM_SCRIPT"] == "1" and seen["NCCL_SOCKET_IFNAME"] == "enp0s19,enp192s20"
    assert seen["LD_LIBRARY_PATH"].split(":")[0] == str(folders["gib"])
    (folders["hpcx"] / "nccl-env-profile.sh").write_text("export NCCL_FROM_SCRIPT=$NCCL_LIB_DIR\n")
    assert what_the_agent_sees(spec(machine="a3-megagpu-8g"), environ)["NCCL_FROM_SCRIPT"] == str(folders["hpcx"])


def test_tcpx_has_no_script_and_a_socket_per_job(monkeypatch, tmp_path):
    found = slurm_fabric("a3-highgpu-8g")
    (tmp_path / "libnccl-net.so").touch()
    monkeypatch.setattr(nccl_settings, "slurm_fabric", lambda _: dataclasses.replace(found, libraries=str(tmp_path)))
    argv, variables = with_nccl_settings(spec(machine="a3-highgpu-8g"), ["agent"], {**JOB, "LD_LIBRARY_PATH": "/x"})
    assert argv == ["agent"] and variables["LD_LIBRARY_PATH"] == f"{tmp_path}:/x"
    assert variables["NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX"] == "/run/tcpx-41"
    assert variables["NCCL_NET"] == "GPUDirectTCPX_v7" and "eth0" not in str(variables)


def test_no_settings_where_none_are_wanted_or_known():
    for of in (
        spec({"nccl": "none"}, machine="a4-highgpu-8g"),
        spec(machine="our-own-box"),
        spec(),
        spec(machine="a4-highgpu-8g", device="cpu"),
    ):
        assert with_nccl_settings(of, ["agent"], JOB) == (["agent"], {})


def test_every_fabric_of_a_machine_has_its_slurm_side():
    wanted = {family.machines[name].fabric.name for family in gke.families().values() for name in family.machines}
    assert set(slurm_fabrics()) == wanted - {"none"}
    for fabric in slurm_fabrics().values():
        assert any(fabric.libraries == path or fabric.libraries.startswith(f"{path}/") for path in fabric.mounts)
        assert all(path.startswith("/") for path in fabric.mounts)


# ---------------------------------------------------------------- what a container must see


BOX = {"container": {"image": "nvcr.io#nvidia/pytorch:25.03-py3"}}


def there(*paths):
    return lambda path: path in paths


@pytest.mark.parametrize(
    ("machine", "paths"),
    [
        ("a4-highgpu-8g", ["/usr/local/gib"]),
        ("a3-ultragpu-8g", ["/usr/local/gib"]),
        ("a3-megagpu-8g", ["/var/lib/tcpxo/lib64", "/dev/aperture_devices"]),
        ("a3-highgpu-8g", ["/var/lib/tcpx/lib64", "/run/tcpx-41"]),
    ],
)
def test_a_container_gets_the_fabrics_paths_of_the_node(machine, paths):
    assert fabric_mounts(spec(BOX, machine=machine), JOB, exists=there(*paths)) == paths
    assert fabric_mounts(spec(BOX, machine=machine), JOB, exists=there(*paths[:1])) == paths[:1], "what is there alone"
    off = {"container": {**BOX["container"], "mount_fabric": False}}
    assert fabric_mounts(spec(off, machine=machine), JOB, exists=there(*paths)) == []
    assert fabric_mounts(spec({**BOX, "nccl": "none"}, machine=machine), JOB, exists=there(*paths)) == []


def test_a_single_node_is_not_prepared_for_tcpx_and_tcpxo():
    paths = ("/var/lib/tcpxo/lib64", "/dev/aperture_devices")
    assert fabric_mounts(spec(BOX, machine="a3-megagpu-8g", hosts=1), JOB, exists=there(*paths)) == []
