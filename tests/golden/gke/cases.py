"""One case per branch of the GKE rendering, and the command that writes the golden files anew.

python tests/golden/gke/cases.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muster.backends.gke.manifests.jobset import run_objects
from muster.backends.gke.manifests.placement import Options, Placement, place
from muster.backends.gke.manifests.render import cluster_objects, run_file_text
from muster.backends.gke.manifests.yaml_text import dump
from muster.config import load
from muster.config.spec import RunSpec

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
RUN_ID = "llama-20260822-101500-1a2b"
RUN_DIR = "gs://example-bucket/runs/llama"
FAMILIES = {
    "a4": "a4-highgpu-8g",
    "a3-ultra": "a3-ultragpu-8g",
    "a3-mega": "a3-megagpu-8g",
    "g2": "g2-standard-48",
}
MODES = ("flex_start_queued", "flex_start", "spot", "reservation", "calendar", "on_demand")


def spec(machine: str | None, mode: str | None, **changes: Any) -> RunSpec:
    """A run file of a 70B model on two hosts; ``changes`` are whole sections or keys of ``resources``."""
    resources: dict[str, Any] = {
        "hosts": 2,
        "image": "us-central1-docker.pkg.dev/example/muster/trainer:1",
        "locations": ["us-central1-b"],
        "machine": machine,
        "provisioning_model": mode,
    }
    if mode in ("reservation", "calendar"):
        resources["reservation"] = "gpus-in-august"
    sections = {key: changes.pop(key) for key in list(changes) if key in RunSpec.model_fields}
    document = {
        "name": "llama",
        "backend": "gke",
        "model": {"source": "meta-llama/Llama-3.1-70B"},
        "data": {"sources": [{"type": "text2sql"}]},
        "training": {"steps": 100},
        "checkpoint": {"dir": "gs://example-bucket/checkpoints"},
        "resources": {**resources, **changes},
        **sections,
    }
    return RunSpec.model_validate(document)


def placement(of: RunSpec, options: Options | None = None, *, run_dir: str = RUN_DIR) -> Placement:
    return place(of, run_id=RUN_ID, run_dir=run_dir, options=options or Options())


def cases() -> dict[str, Placement]:
    """Name -> placement. A4 and A3 Ultra are not sold on demand, so those two cases are refusals, tested elsewhere."""
    found = {}
    for family, machine in FAMILIES.items():
        for mode in MODES:
            if mode == "on_demand" and family in ("a4", "a3-ultra"):
                continue
            found[f"{family}-{mode}".replace("_", "-")] = placement(spec(machine, mode))
    found["a3-high-spot"] = placement(spec("a3-highgpu-8g", "spot"))
    found["a3-high-1g-flex-start"] = placement(spec("a3-highgpu-1g", "flex_start"))
    found["a2-ultra-on-demand"] = placement(spec("a2-ultragpu-8g", "on_demand"))
    found["cpu-owned"] = placement(spec(None, None, device="cpu", hosts=3), Options(kueue=False))
    for mode in ("flex_start", "spot", "reservation", "on_demand"):
        found[f"tpu-v5e-4x4-{mode}".replace("_", "-")] = placement(
            spec("ct5lp-hightpu-4t", mode, hosts=4, device="tpu")
        )
    found["tpu-v5p-2x2x2-spot"] = placement(spec("ct5p-hightpu-4t", "spot", device="tpu"))
    found["tpu-v6e-2x4-one-host-spot"] = placement(spec("ct6e-standard-8t", "spot", hosts=1, device="tpu"))
    found["tpu-v6e-two-slices-spot"] = placement(
        spec("ct6e-standard-4t", "spot", hosts=8, device="tpu", parallelism={"dp_replicate": 2})
    )
    found["a4-spot-claims"] = placement(spec("a4-highgpu-8g", "spot"), Options(network="claims"))
    found["a4-spot-nccl-catalogue"] = placement(spec("a4-highgpu-8g", "spot"), Options(nccl="catalogue"))
    found["a3-mega-spot-nccl-catalogue"] = placement(spec("a3-megagpu-8g", "spot"), Options(nccl="catalogue"))
    found["g2-spot-claim"] = placement(spec("g2-standard-48", "spot"), Options(run_claim="runs"))
    mounts = spec(
        "g2-standard-48",
        "spot",
        spare_hosts=1,
        queue="research",
        checkpoint={"dir": "/gcs/example-bucket/checkpoints"},
        data={
            "sources": [{"type": "file", "path": "/gcs/example-data/train.jsonl"}],
            "cache_dir": "/gcs/example-data/c",
        },
        limits={"max_hours": 12},
    )
    found["g2-spot-mounts"] = placement(mounts, Options(namespace="team", nodes_in_quota=8))
    for name in ("megatron-5b", "nemo-5b"):  # containers with a script of their own, as they ship
        found[name] = placement(load.load(EXAMPLES / f"{name}.yaml", environment=False).spec)
    return found


def text(of: Placement) -> dict[str, str]:
    """File name -> text. The resolved run file is left out: its keys are not this back end's."""
    run = run_objects(of, run_file_text(of), "the whole run file as JSON\n")
    return {"cluster.yaml": dump(cluster_objects(of)), "run.yaml": dump(run)}


def main() -> None:
    for old in HERE.glob("*/*.yaml"):
        old.unlink()
    for name, of in cases().items():
        (HERE / name).mkdir(exist_ok=True)
        for file, content in text(of).items():
            (HERE / name / file).write_text(content)
    print(f"wrote {len(cases())} cases under {HERE}")


if __name__ == "__main__":
    main()
