"""One case per branch of the rendering for Vertex AI, and the command that writes the golden files anew.

python tests/golden/vertex/vertex_cases.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from muster.backends.vertex.custom_job import requests
from muster.backends.vertex.placement import Placement, place
from muster.config import load
from muster.config.spec import RunSpec

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
RUN_ID = "llama-20260822-101500-1a2b"
RUN_DIR = "gs://example-bucket/runs/llama"
IMAGE = "us-central1-docker.pkg.dev/example/muster/trainer:1"
ACCOUNT = "trainer@example-project.iam.gserviceaccount.com"
TRAINED = {
    "model": {"source": "meta-llama/Llama-3.1-8B"},
    "data": {"sources": [{"type": "text2sql"}]},
    "training": {"steps": 100},
}


def spec(machine: str | None = "a3-megagpu-8g", mode: str | None = "spot", **changes: Any) -> RunSpec:
    """A run file of Llama 3.1 8B on two hosts; ``changes`` are whole sections or keys of ``resources``."""
    resources: dict[str, Any] = {
        "hosts": 2,
        "image": IMAGE,
        "project": "example-project",
        "locations": ["us-central1"],
        "machine": machine,
        "provisioning_model": mode,
    }
    sections = {key: changes.pop(key) for key in list(changes) if key in RunSpec.model_fields}
    trained = {} if "command" in sections else TRAINED
    vertex = {"service_account": ACCOUNT, **sections.pop("vertex", {})}
    base = {"name": "llama", "backend": "vertex", "run_dir": RUN_DIR, "vertex": vertex, **trained, **sections}
    return RunSpec.model_validate({**base, "resources": {**resources, **changes}})


def example(name: str) -> RunSpec:
    """The shipped run file of a container with a script, with what docs/how-to/own-loop.md replaces for Vertex AI."""
    overrides = [
        "backend=vertex", "resources.locations=[us-central1]", "resources.provisioning_model=spot",
        f"vertex.service_account={ACCOUNT}",
    ]  # fmt: skip
    return load.load(EXAMPLES / f"{name}.yaml", overrides, environment=False).spec


def placement(of: RunSpec) -> Placement:
    return place(of, run_id=RUN_ID, run_dir=None)


def cases() -> dict[str, Placement]:
    """Name -> placement. The first four are the examples that people start from."""
    lora = {"source": "meta-llama/Llama-3.1-8B", "lora": {"rank": 16}}
    found = {
        "lora-8b-one-machine": spec(
            "g2-standard-96", "flex_start", hosts=1, model=lora, locations=["us-central1", "us-east4"]
        ),
        "full-8b-two-machines": spec(
            "a3-highgpu-8g", "flex_start", limits={"max_hours": 12}, locations=["us-central1", "europe-west4"],
            vertex={"hugging_face_secret": "projects/example-project/secrets/hugging-face/versions/3"},
        ),
        "megatron-5b-eight-machines": example("megatron-5b"),
        "nemo-5b-eight-machines": example("nemo-5b"),
        "a4-spot-script": spec("a4-highgpu-8g", "spot", locations=["us-central1"]),
        "a3-ultra-reservation": spec(
            "a3-ultragpu-8g", "reservation", spare_hosts=1, locations=["us-east5"],
            reservation="projects/example-project/zones/us-east5-a/reservations/gpus-in-august",
        ),
        "a2-reducers": spec(
            "a2-highgpu-8g", "on_demand", hosts=4, locations=["us-central1", "europe-west4"],
            parallelism={"dp_replicate": 4},
            vertex={"reduction_servers": 12, "boot_disk_gb": 500, "boot_disk_type": "pd-standard"},
        ),
        "private-watched": spec(
            "g2-standard-48", "on_demand",
            vertex={
                "network_attachment": "projects/example-project/regions/us-central1/networkAttachments/training",
                "tensorboard": "projects/123456/locations/us-central1/tensorboards/987654321",
                "web_access": True,
                "max_wait_hours": 0.5,
            },
        ),
        "peered": spec("g2-standard-48", "on_demand", vertex={"network": "projects/123456/global/networks/training"}),
        "cpu": spec("n1-standard-4", None, hosts=3),
        "tpu-v5e-4x4": spec("ct5lp-hightpu-4t", "spot", hosts=4, device="tpu"),
        "tpu-v6e-one-host": spec("ct6e-standard-8t", "on_demand", hosts=1, device="tpu", locations=["us-east5"]),
    }  # fmt: skip
    return {name: placement(one) for name, one in found.items()}


def text(of: Placement) -> dict[str, str]:
    """File name -> text. The digest of the resolved run file is left out: it changes with keys that are not of here."""
    return {
        f"{request.region}.json": re.sub(r'"[0-9a-f]{64}"', '"SHA256 OF THE RUN FILE"', request.text())
        for request in requests(of)
    }


def main() -> None:
    for old in HERE.glob("*/*.json"):
        old.unlink()
    for name, of in cases().items():
        (HERE / name).mkdir(exist_ok=True)
        for file, content in text(of).items():
            (HERE / name / file).write_text(content)
    print(f"wrote {len(cases())} cases under {HERE}")


if __name__ == "__main__":
    main()
