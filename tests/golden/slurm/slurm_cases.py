"""One case per branch of the Slurm rendering, and the command that writes the golden files anew.

python tests/golden/slurm/slurm_cases.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muster.backends.slurm import container
from muster.backends.slurm.script import SCRIPT, program, python_in_step, script
from muster.backends.slurm.toolkit.blueprint import blueprint
from muster.config import load
from muster.config.spec import RunSpec

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
RUN_ID = "llama-20260822-101500-1a2b"
RUN_DIR = "/home/me/.muster/runs/" + RUN_ID
VENV = "/home/me/muster/.venv"


def spec(slurm: dict[str, Any] | None = None, limits: dict[str, Any] | None = None, **resources: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "llama",
            "backend": "slurm",
            "model": {"source": "meta-llama/Llama-3.1-70B"},
            "data": {"sources": [{"type": "text2sql"}]},
            "training": {"steps": 100},
            "resources": {"hosts": 2, "device": "cuda", "ranks_per_host": 8, **resources},
            "limits": limits or {},
            "slurm": {"venv": VENV, **(slurm or {})},
        }
    )


def scripts() -> dict[str, RunSpec]:
    """Name -> run file, for each branch of the script."""
    hostile = {
        "account": 'it\'s "me" $(touch /tmp/owned) `x` # ; \\',
        "environment": {"GREETING": "two words, 'quoted' $HOME \\ end"},
        "modules": ["cuda/12.8; touch /tmp/owned"],
        "venv": "/home/me/my venv",
        "options": ["--mail-user=a b@example.org"],
    }
    return {
        "plain": spec(),
        "cpu": spec({"exclusive": False, "cpus_per_host": 16, "memory": "64G"}, device="cpu", ranks_per_host=2),
        "typed-gpus": spec({"gres": "gpu:h100:8", "qos": "high", "account": "lab"}, spare_hosts=1, queue="gpu"),
        "limits": spec({"signal_before_timeout_s": 600, "requeue": False}, {"max_hours": 36.5}),
        "site": spec(
            {"modules": ["cuda/12.8", "nccl/2.27"], "constraint": "a3mega&ib4", "exclude": "node[3,7]",
             "environment": {"NCCL_DEBUG": "WARN"}, "scratch": "/scratch", "time_limit": "2-00:00:00"},
            reservation="gpus-in-august",
        ),
        "container": spec({"container": {"image": "nvcr.io#nvidia/pytorch:25.03-py3", "mounts": ["/data:/data"]}}),
        "hostile": spec(hostile),
        "megatron-5b": example("megatron"),
        "nemo-5b": example("nemo"),
    }  # fmt: skip


def example(name: str) -> RunSpec:
    """The shipped run file of a container with its own script, with what docs/how-to/own-loop.md replaces for Slurm."""
    gone = ("run_dir", "resources.image", "resources.project", "resources.provisioning_model")
    overrides = [
        "backend=slurm", *(f"{key}=null" for key in gone), "resources.locations=[]", f"slurm.venv={VENV}",
        f"slurm.container.image=us-central1-docker.pkg.dev#example-project/muster/{name}:1",
    ]  # fmt: skip
    return load.load(EXAMPLES / f"{name}-5b.yaml", overrides, environment=False).spec


def step(of: RunSpec) -> str:
    """The first node's step as the job's script starts it, a word a line."""
    node = [*program("backends.slurm.node", python_in_step(of), run_id=RUN_ID, run_dir=RUN_DIR), "--host", "host-0"]
    return "\n".join(container.step(of, RUN_DIR, "node-0", node, {})) + "\n"


def blueprints() -> dict[str, RunSpec]:
    """Name -> run file, for each machine and way of buying it."""
    google = {"project": "my-project", "locations": ["us-central1-b"], "spare_hosts": 1}
    return {
        "toolkit-a3-mega-spot": spec(**google, machine="a3-megagpu-8g", provisioning_model="spot"),
        "toolkit-a3-ultra-flex": spec(**google, machine="a3-ultragpu-8g", provisioning_model="flex_start"),
        "toolkit-a4-reservation": spec(
            **google, machine="a4-highgpu-8g", provisioning_model="reservation", reservation="mine"
        ),
    }


def texts() -> dict[str, str]:
    """File below this folder -> text."""
    found = {f"{name}/{SCRIPT}": script(of, run_id=RUN_ID, run_dir=RUN_DIR) for name, of in scripts().items()}
    found |= {f"{name}/step.txt": step(of) for name, of in scripts().items() if of.slurm.container is not None}
    for name, of in blueprints().items():
        found |= {f"{name}/{file}": text for file, text in blueprint(of).items()}
    return found


def main() -> None:
    for old in [*HERE.glob("*/*.sh"), *HERE.glob("*/*.txt"), *HERE.glob("*/*.yaml")]:
        old.unlink()
    for file, content in texts().items():
        path = HERE / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    print(f"wrote {len(texts())} files under {HERE}")


if __name__ == "__main__":
    main()
