"""One case per branch of the rendering for Compute Engine, and the command that writes the golden files anew.

python tests/golden/gce/gce_cases.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from muster.backends.gce import requests
from muster.backends.gce.placement import Placement, place
from muster.config.spec import RunSpec

HERE = Path(__file__).parent
RUN_ID = "llama-20260822-101500-1a2b"
BUNDLE = f"gs://example-bucket/bundles/{'0123456789abcdef' * 4}.tar.gz"
GCE = {
    "service_account": "muster-hosts@example-project.iam.gserviceaccount.com",
    "supervisor_service_account": "muster-supervisor@example-project.iam.gserviceaccount.com",
    "bundle": BUNDLE,
}
TRAINED = {
    "model": {"source": "meta-llama/Llama-3.1-8B"},
    "data": {"sources": [{"type": "text2sql"}]},
    "training": {"steps": 100},
}


def spec(machine: str | None = "a3-megagpu-8g", mode: str | None = "spot", **changes: Any) -> RunSpec:
    """A run file of Llama 3.1 8B on two hosts; ``changes`` are whole sections or keys of ``resources``."""
    resources: dict[str, Any] = {
        "hosts": 2,
        "project": "example-project",
        "locations": ["us-central1-a"],
        "machine": machine,
        "provisioning_model": mode,
    }
    sections = {key: changes.pop(key) for key in list(changes) if key in RunSpec.model_fields}
    trained = {} if "command" in sections else TRAINED
    gce = {**GCE, **sections.pop("gce", {})}
    base = {"name": "llama", "backend": "gce", "run_dir": "gs://example-bucket/runs/llama", **trained, **sections}
    return RunSpec.model_validate({**base, "gce": gce, "resources": {**resources, **changes}})


def placement(of: RunSpec) -> Placement:
    return place(of, run_id=RUN_ID, run_dir=None)


def cases() -> dict[str, Placement]:
    """Name -> placement. The first is the page's example."""
    found = {
        "full-8b-flex-two-zones": spec(
            "a3-highgpu-8g", "flex_start", limits={"max_hours": 12}, locations=["us-central1-a", "us-central1-c"],
            gce={"hugging_face_secret": "projects/example-project/secrets/hugging-face/versions/3"},
        ),
        "l4-on-demand": spec("g2-standard-48", "on_demand", locations=["us-central1-a", "us-east4-a"]),
        "a2-compact": spec("a2-highgpu-8g", "on_demand", hosts=4, min_hosts=3, spare_hosts=1),
        "a3-mega-spot": spec("a3-megagpu-8g", "spot", limits={"max_hours": 100}),
        "a4-flex": spec("a4-highgpu-8g", "flex_start", private=True),
        "a3-ultra-reservation": spec(
            "a3-ultragpu-8g", "reservation", spare_hosts=1,
            reservation="projects/owner-project/reservations/gpus-in-august/reservationBlocks/block-1",
            gce={
                "image": "projects/example-project/global/images/family/muster",
                "subnetwork": "projects/example-project/regions/us-central1/subnetworks/training",
                "boot_disk_gb": 500,
            },
        ),
        "a3-high-calendar": spec("a3-highgpu-8g", "calendar", reservation="november"),
        "cpu": spec("e2-standard-4", "on_demand", hosts=3),
        "tpu-v6e-spot": spec("ct6e-standard-4t", "spot", hosts=4, device="tpu"),
        "tpu-v6e-one-host": spec("ct6e-standard-8t", "on_demand", hosts=1, device="tpu"),
        "tpu-v5p-flex-two-slices": spec(
            "ct5p-hightpu-4t", "flex_start", hosts=4, device="tpu", parallelism={"dp_replicate": 2},
            limits={"max_hours": 12},
        ),
        "tpu-v6e-reservation": spec(
            "ct6e-standard-4t", "reservation", hosts=2, device="tpu", reservation="chips-in-august"
        ),
    }  # fmt: skip
    return {name: placement(one) for name, one in found.items()}


def text(of: Placement) -> dict[str, str]:
    """File name -> text. The start-up script and the digest of the resolved run file are left out: the one is a file of
    its own, the other changes with keys that are not of here."""
    script = json.dumps(requests.startup_script())
    return {
        name: re.sub(
            r'"[0-9a-f]{64}"', '"SHA256 OF THE RUN FILE"', requests.text(rows).replace(script, '"THE STARTUP SCRIPT"')
        )
        for name, rows in requests.files(of).items()
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
