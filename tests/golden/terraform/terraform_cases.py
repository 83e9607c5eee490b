"""Terraform for run files of GKE, and the command that writes the golden files anew.

python tests/golden/terraform/terraform_cases.py
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
for folder in ("gke", "gce"):
    sys.path.append(str(HERE.parent / folder))

import cases as gke  # noqa: E402
import gce_cases as gce  # noqa: E402

from muster.backends.gce.inventory import rendered as of_gce  # noqa: E402
from muster.backends.gke.formats import terraform_files as of_gke  # noqa: E402
from muster.backends.gke.manifests.placement import Options  # noqa: E402

PRIVATE = {"private": True, "authorized_networks": ["203.0.113.7/32"]}


def on_gke(machine: str, mode: str, options: Options | None = None, **changes: object) -> Mapping[str, str]:
    return of_gke(gke.placement(gke.spec(machine, mode, project="example-project", **changes), options))


def on_gce(machine: str, mode: str, **changes: object) -> Mapping[str, str]:
    return of_gce(gce.placement(gce.spec(machine, mode, **changes)))


def cases() -> dict[str, Mapping[str, str]]:
    """Name -> file -> text."""
    return {
        "gke-a4-queued-private": on_gke("a4-highgpu-8g", "flex_start_queued", **PRIVATE),
        "gke-l4-on-demand": on_gke("g2-standard-48", "on_demand"),
        "gce-a3-mega-spot": on_gce("a3-megagpu-8g", "spot"),
        "gce-cpu-private": on_gce("e2-standard-4", "on_demand", private=True),
    }


def recorded(files: Mapping[str, str]) -> dict[str, str]:
    """What depends on the run file: all but the files as they are shipped."""
    return {name: text for name, text in files.items() if not name.endswith(".tf") or "/" in name or name == "moved.tf"}


def main() -> None:
    for name, files in cases().items():
        shutil.rmtree(HERE / name, ignore_errors=True)
        for file, content in recorded(files).items():
            path = HERE / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    print(f"wrote {len(cases())} cases under {HERE}")


if __name__ == "__main__":
    main()
