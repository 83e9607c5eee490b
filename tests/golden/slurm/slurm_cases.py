"""One case per branch of the Slurm rendering, and the command that writes the golden files anew.

python tests/golden/slurm/slurm_cases.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muster.backends.slurm.script import SCRIPT, script
from muster.backends.slurm.toolkit import blueprint
from muster.config.spec import RunSpec

HERE = Path(__file__).parent
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
    }  # fmt: skip


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
    for name, of in blueprints().items():
        found |= {f"{name}/{file}": text for file, text in blueprint(of).items()}
    return found


def main() -> None:
    for old in [*HERE.glob("*/*.sh"), *HERE.glob("*/*.yaml")]:
        old.unlink()
    for file, content in texts().items():
        path = HERE / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    print(f"wrote {len(texts())} files under {HERE}")


if __name__ == "__main__":
    main()
