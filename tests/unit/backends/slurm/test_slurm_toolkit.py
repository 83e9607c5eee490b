"""A blueprint refers to what it defines, by names that the Toolkit's modules have; its scripts do what they say."""

import functools
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from slurm_cases import blueprints, spec

from muster.backends.slurm.toolkit.blueprint import blueprint
from muster.catalog.toolkit import toolkit
from muster.core.errors import RunFileError

HERE = Path(__file__).parent
YAML_READER = YAML(typ="safe", pure=True)
TABLE = YAML_READER.load((HERE / "toolkit_names.yaml").read_text())
NAMES = TABLE["modules"]
#: What gcluster itself gives every module that has a setting of this name.
GLOBAL = {"labels"}


def parsed(name):
    files = blueprint(blueprints()[name])
    built, deployment = YAML_READER.load(files["blueprint.yaml"]), YAML_READER.load(files["deployment.yaml"])
    modules = [module for group in built["deployment_groups"] for module in group["modules"]]
    return built, deployment, modules


@pytest.mark.parametrize("name", blueprints())
def test_a_blueprint_refers_to_what_it_defines(name):
    built, deployment, modules = parsed(name)
    names = [module["id"] for module in modules]
    assert len(names) == len(set(names))
    known = set(built["vars"]) | set(deployment["vars"])
    assert set(re.findall(r"(?<![a-z_])vars\.([a-z_0-9]+)", json.dumps([built, deployment]))) <= known
    for place, module in enumerate(modules):
        assert set(module.get("use", ())) <= set(names[:place]), f"{module['id']} uses what comes later"
        for reference in re.findall(r"\$\(([a-z-]+)\.", str(module["settings"])):
            assert reference == "vars" or reference in names[:place]
    sizes = [module["settings"]["disk_size_gb"] for module in modules if "instance_image" in module["settings"]]
    image = next(module for module in modules if module.get("kind") == "packer")
    assert len(sizes) == 3 and min(sizes) >= image["settings"]["disk_size"], "a disk holds its image"
    controller = modules[-1]
    assert {"homefs", "partition", "login"} <= set(controller["use"])
    assert deployment["vars"]["cluster_size"] == 3, "spares are nodes too"
    assert "gcluster destroy llama" in blueprint(blueprints()[name])["blueprint.yaml"]


@pytest.mark.parametrize("name", blueprints())
def test_modules_take_and_give_the_names_that_a_blueprint_uses(name):
    built, deployment, modules = parsed(name)
    variables = set(built["vars"]) | set(deployment["vars"])
    outputs = {module["id"]: NAMES[module["source"]]["outputs"] for module in modules}
    for module in modules:
        known, settings = NAMES[module["source"]], module["settings"]
        assert set(settings) <= set(known["settings"]), module["id"]
        used = {used: set(outputs[used]) & set(known["settings"]) for used in module.get("use", ())}
        assert all(used.values()), f"{module['id']}: gcluster refuses a `use` that gives nothing: {used}"
        given = {
            *settings,
            *variables,
            *GLOBAL,
            known.get("injected"),
            *(name for names in used.values() for name in names),
        }
        assert set(known["required"]) <= given, module["id"]
        assert set(module.get("outputs", ())) <= set(known["outputs"])
        for key, value in settings.items():
            fields = known.get("fields", {}).get(key)
            assert (
                not isinstance(value, dict)
                or fields
                or key in ("node_conf", "partition_conf", "instance_image", "metadata")
            )
            for one in value if isinstance(value, list) else [value]:
                if fields and isinstance(one, dict):
                    assert set(one) <= set(fields), f"{module['id']}: {key}"
        for other, output in re.findall(r"(?<![\w.])([a-z][a-z-]*)\.([a-z_]+)(?=[),])", str(settings)):
            assert other == "vars" or output in outputs[other], f"{module['id']}: {other}.{output}"
    (nodes,) = [module for module in modules if module["id"] == "nodeset"]
    interface = nodes["settings"].get("additional_networks", "")
    assert set(re.findall(r"(\w+)=", interface)) <= set(NAMES[nodes["source"]]["fields"]["additional_networks"])


@pytest.mark.parametrize("name", blueprints())
def test_no_variable_is_unused(name):
    """gcluster refuses a blueprint with one."""
    built, deployment, modules = parsed(name)
    text = json.dumps(modules)
    settings = {setting for module in modules for setting in NAMES[module["source"]]["settings"]}
    for variable in {*built["vars"], *deployment["vars"]}:
        assert re.search(rf"vars\.{variable}\b", text) or variable in settings, variable


def test_the_names_are_of_the_release_that_a_blueprint_is_written_for():
    assert TABLE["toolkit"] == toolkit().toolkit
    assert (
        "settings as of Cluster Toolkit v1.95.0" in blueprint(blueprints()["toolkit-a4-reservation"])["blueprint.yaml"]
    )


def test_the_images_own_python_runs_muster():
    project = tomllib.loads((HERE.parents[3] / "pyproject.toml").read_text())["project"]
    least = tuple(int(part) for part in project["requires-python"].removeprefix(">=").split("."))
    assert tuple(int(part) for part in toolkit().python.split(".")) >= least
    assert "2404" in toolkit().base_image["image"] and toolkit().python == "3.12", "Ubuntu 24.04 has 3.12"


def test_private_clusters_have_no_public_addresses():
    of = blueprints()["toolkit-a4-reservation"]
    private = of.model_copy(update={"resources": of.resources.model_copy(update={"private": True})})
    text = blueprint(private)["blueprint.yaml"]
    assert "public_ips: true" not in text and "omit_external_ip: true" in text
    assert blueprint(of)["blueprint.yaml"].count("public_ips: true") == 2


def test_what_is_not_sold_or_not_said_is_refused():
    with pytest.raises(RunFileError) as caught:
        blueprint(spec(machine="a4-highgpu-8g", provisioning_model="on_demand"))
    text = str(caught.value)
    assert "resources.provisioning_model" in text and "resources.project" in text and "resources.locations" in text
    with pytest.raises(RunFileError, match="has no Cluster Toolkit blueprint"):
        blueprint(spec(machine="n2-standard-8", project="p", locations=["us-central1-b"]))
    google = {"project": "p", "locations": ["us-central1-b"], "provisioning_model": "spot"}
    with pytest.raises(RunFileError, match=r"resources\.queue.*lower-case"):
        blueprint(spec(**google, machine="a4-highgpu-8g", queue="My_Partition"))


# ---------------------------------------------------------------- the scripts, run


#: apt and its neighbours, as far as an order can be wrong: a repository counts after an update alone, an update needs
#: each repository's key, an ar+https one the transport, and a package the repository that has it.
PLAYED = r"""#!/usr/bin/env python3
import glob, json, os, re, sys
root = os.environ["ROOT"]
program, words = os.path.basename(sys.argv[0]), sys.argv[1:]
if program in ("curl", "gpg", "dpkg-query"):  # in pipes, so beside others
    text = sys.stdin.read() if program == "gpg" else {"curl": words[-1]}.get(program, "nvidia-fabricmanager-580")
    print(text, file=open(words[words.index("-o") + 1], "w") if "-o" in words else sys.stdout)
    sys.exit()
path = f"{root}/state.json"
state = json.load(open(path)) if os.path.exists(path) else {"installed": [], "index": [], "cuda": False, "calls": []}
state["calls"].append([program, *words])
FROM = {"apt-transport-artifact-registry": "apt-transport-artifact-registry-stable", "nccl-gib": "gpudirect-gib-apt",
        "dmabuf-import-helper": "gpudirect-tcpxo-apt", "libnccl2": "cuda", "libnccl-dev": "cuda",
        "nvidia-container-toolkit": "cuda", "datacenter-gpu-manager-4-core": "cuda",
        "datacenter-gpu-manager-4-cuda13": "cuda"}
UBUNTU = ("git", "dkms", "ibverbs-utils", "python3.12", "python3.12-venv")

def die(text):
    json.dump(state, open(path, "w"))
    sys.exit(f"{program}: {text}")

def have(package):
    name = package.partition("=")[0]
    if name not in UBUNTU and FROM.get(name) not in state["index"]:
        die(f"E: Unable to locate package {name}")
    return name

if program == "apt-get" and words[0] == "update":
    state["index"] = ["cuda"] if state["cuda"] else []
    for file in glob.glob(f"{root}/etc/apt/sources.list.d/*.list"):
        options, uri, suite = re.fullmatch(r"deb (\[.*?\] )?(\S+) (\S+) main\n", open(file).read()).groups()
        key = re.search(r"signed-by=([^ \]]+)", options or "")
        if not (key and os.path.getsize(key[1])) and "trusted=yes" not in (options or ""):
            die(f"E: NO_PUBKEY {suite}")
        if uri.startswith("ar+https") and "apt-transport-artifact-registry" not in state["installed"]:
            die("E: The method driver ar+https could not be found.")
        state["index"].append(suite)
elif program == "apt-get":
    packages = [word for word in words[1:] if not word.startswith("-")]
    for package in packages:
        name = have(package)
        if words[0] == "download":
            open(f"{name}_1.1_all.deb", "w").close()
        else:
            state["installed"].append(name)
elif program == "dpkg":
    assert words[0] == "-i" and os.path.getsize(words[1])
    state["cuda"] = True
elif program == "dpkg-deb":
    assert words[0] == "-x" and os.path.exists(words[1])
    source = f"{words[2]}/usr/src/dmabuf-import-helper-1.1"
    os.makedirs(source)
    open(f"{source}/import-helper.c", "w").write("MODULE_IMPORT_NS(DMA_BUF);\n")
elif program == "dkms":
    if 'NS("DMA_BUF")' not in open(f"{root}/usr/src/dmabuf-import-helper-1.1/import-helper.c").read():
        die("Error! Bad return status for module build on kernel: 6.17")
json.dump(state, open(path, "w"))
"""
PROGRAMS = ("apt-get", "apt-mark", "dpkg", "dpkg-deb", "dpkg-query", "dkms", "curl", "gpg", "systemctl", "sysctl",
            "ansible-pull", "update-initramfs")  # fmt: skip


class Machine:
    """A folder that scripts take for the root of a machine; programs that touch one are played."""

    def __init__(self, root):
        self.root = root
        for folder in (
            "programs", "etc/apt/sources.list.d", "etc/systemd/system", "etc/sysctl.d", "usr/share/keyrings", "usr/src",
            "usr/local/bin", "var/tmp", "opt/apps/adm", "proc/sys/kernel", "etc/google-cloud-ops-agent",
            "dev/aperture_devices",
        ):  # fmt: skip
            (root / folder).mkdir(parents=True)
        (root / "proc/sys/kernel/apparmor_restrict_unprivileged_userns").write_text("1")
        (root / "etc/google-cloud-ops-agent/config.yaml").write_text("logging: {}\n")
        (root / "programs" / "played").write_text(PLAYED)
        (root / "programs" / "played").chmod(0o755)
        for program in PROGRAMS:
            (root / "programs" / program).symlink_to("played")

    def run(self, runner):
        content = re.sub(r"\$\(vars\.(\w+)\)", r"value-of-\1", runner["content"])
        assert "$(" not in content, "the Toolkit would take it for a reference"
        if runner["type"] == "data":
            path = self.root / runner["destination"].removeprefix("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            return ""
        script = self.root / runner["destination"]
        folders = r"etc|usr/share/keyrings|usr/src|usr/local/bin|var/tmp|opt/apps|proc/sys|dev/aperture_devices"
        script.write_text(re.sub(rf"(?<![\w.:/}}-])/({folders})\b", rf"{self.root}/\1", content))
        environ = {"PATH": f"{self.root}/programs:/usr/bin:/bin", "ROOT": str(self.root)}
        done = subprocess.run(
            ["bash", str(script)], env=environ, cwd=self.root, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{runner['destination']}: {done.stderr}"
        return done.stdout

    @property
    def state(self):
        return json.loads((self.root / "state.json").read_text())

    def text(self, path):
        return (self.root / path).read_text()


def runners(name, module_id):
    _, _, modules = parsed(name)
    return next(module for module in modules if module["id"] == module_id)["settings"]["runners"]


@pytest.fixture(scope="module")
def booted(tmp_path_factory):
    """Of a blueprint's name, the machine that a node of it is: its image built, then started."""

    @functools.cache
    def boot(name):
        machine = Machine(tmp_path_factory.mktemp(name) / "root")
        for module in ("build-script", "node-startup"):
            for runner in runners(name, module):
                machine.run(runner)
        return machine

    return boot


@pytest.mark.parametrize("name", ["toolkit-a3-ultra-flex", "toolkit-a4-reservation"])
def test_a_gib_node_has_its_plugin_because_keys_and_repositories_come_first(booted, name):
    machine = booted(name)
    installed = machine.state["installed"]
    assert {"nccl-gib", "libnccl2", "ibverbs-utils", "python3.12-venv", "datacenter-gpu-manager-4-core"} <= set(
        installed
    )
    assert installed.index("apt-transport-artifact-registry") < installed.index("nccl-gib")
    assert ["apt-mark", "hold", "nccl-gib"] in machine.state["calls"]
    assert ["apt-mark", "hold", "nvidia-fabricmanager-580"] in machine.state["calls"]


def test_a_tcpxo_node_has_its_module_its_devices_and_docker_for_the_daemon(booted):
    name = "toolkit-a3-mega-spot"
    machine = booted(name)
    calls = machine.state["calls"]
    assert [words[1] for words in calls if words[0] == "dkms"] == ["add", "build", "install"]
    rule = machine.text("etc/udev/rules.d/00-a3-megagpu.rules")
    assert 'ATTR{vendor}=="0x1ae0"' in rule and "/dev/aperture_devices/%k" in rule
    assert ["update-initramfs", "-u", "-k", "all"] in calls
    assert "ExecCondition=" in machine.text("etc/systemd/system/slurmd.service.d/aperture.conf")
    waits = machine.root / "usr/local/bin/wait-for-aperture-devices.sh"
    (machine.root / "dev/aperture_devices/0000:06:00.0").mkdir()
    assert os.access(waits, os.X_OK) and subprocess.run(["bash", str(waits)], check=False, timeout=1).returncode == 0
    (machine.root / "dev/aperture_devices/0000:06:00.0").rmdir()
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["bash", str(waits)], check=False, timeout=1)
    _, _, modules = parsed(name)
    docker = {module["id"]: module["settings"].get("docker", {}) for module in modules}
    assert docker["build-script"]["enabled"] and json.loads(docker["node-startup"]["daemon_config"])["data-root"]
    assert "nvidia-container-toolkit" in machine.state["installed"]
    assert "etc/long-prolog-slurm.conf.tpl" in modules[-1]["settings"]["slurm_conf_tpl"]


@pytest.mark.parametrize("name", blueprints())
def test_every_node_can_run_containers_and_watches_its_gpus(booted, name):
    machine = booted(name)
    enroot = dict(line.split() for line in machine.text("etc/enroot/enroot.conf").splitlines())
    assert enroot["ENROOT_CONFIG_PATH"] == "${HOME}/.enroot"
    assert all(
        enroot[f"ENROOT_{kind}_PATH"].startswith("value-of-local_ssd/${UID}/enroot")
        for kind in ("DATA", "CACHE", "TEMP")
    )
    assert "userns = 0" in machine.text("etc/sysctl.d/90-enroot.conf") and machine.text("etc/hostname")
    agent = YAML_READER.load(machine.text("etc/google-cloud-ops-agent/config.yaml"))
    assert agent["metrics"]["service"]["pipelines"]["dcgm"]["receivers"] == ["dcgm"] and "logging" in agent
    services = [words for words in machine.state["calls"] if words[0] == "systemctl" and "nvidia-dcgm.service" in words]
    assert [words[1] for words in services][:2] == ["disable", "enable"], "on nodes alone"
    (again,) = [runner for runner in runners(name, "node-startup") if runner["destination"] == "start-dcgm.sh"]
    machine.run(again)  # a node that starts a second time
    assert machine.text("etc/google-cloud-ops-agent/config.yaml").count("type: dcgm") == 1


@pytest.mark.parametrize("name", blueprints())
def test_the_controller_stages_what_nodes_run_around_a_job(tmp_path, name):
    machine = Machine(tmp_path / "root")
    for runner in runners(name, "controller-startup"):
        machine.run(runner)
    partition = next(module for module in parsed(name)[2] if module["id"] == "partition")["settings"]["partition_name"]
    folder = machine.root / "opt/apps/adm/slurm"
    staged = {str(path.relative_to(folder)) for path in folder.glob("partition-*/*")}
    rxdm = {f"partition-{partition}-{kind}_slurmd.d/rxdm.{kind}_slurmd" for kind in ("prolog", "epilog")}
    test = {f"partition-{partition}-epilog_slurmd.d/gpu-test.epilog_slurmd"}
    assert staged == test | (rxdm if "mega" in name else set())


def test_the_played_apt_refuses_the_order_that_a_real_one_refuses(tmp_path):
    """Else the tests above could not fail."""
    (install,) = [
        one for one in runners("toolkit-a4-reservation", "node-startup") if one["destination"] == "install-gib.sh"
    ]
    keys = [line for line in install["content"].splitlines() if "gpg" in line]
    assert len(keys) >= 4
    for place, gone in enumerate(
        (r"curl.*apt-key.*\\\n.*\n", r"apt-get install -y apt-transport.*\n", r"echo.*\\\n.*gib\.list\n")
    ):
        changed, times = re.subn(gone, "", install["content"], count=1)
        assert times == 1, gone
        with pytest.raises(AssertionError, match=r"NO_PUBKEY|could not be found|No such file|Unable to locate"):
            Machine(tmp_path / str(place)).run({**install, "content": changed})
