"""What only machines of Compute Engine need; machine, zones, mode, reservation and project are in ``resources``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from muster.config.sections.resources import ACCOUNT
from muster.config.sections.section import Section
from muster.config.sections.vertex import SECRET

_NAME = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
SUBNETWORK = rf"^projects/[a-z0-9.:-]+/regions/[a-z0-9-]+/subnetworks/{_NAME}$"
IMAGE = rf"^projects/[a-z0-9.:-]+/global/images/(family/)?{_NAME}$"
#: Its own digest is its name: who can change the bucket cannot change what hosts run.
BUNDLE = r"^gs://[a-z0-9][a-z0-9._-]{1,220}/(.+/)?[0-9a-f]{64}\.tar\.gz$"


class Gce(Section):
    """How machines are asked for on Compute Engine (``backend: gce``)."""

    service_account: Annotated[str, Field(pattern=ACCOUNT)] | None = None
    """The account that hosts act as. It reads and writes the run's bucket and reads the run's secrets; it needs no
    right on machines."""
    supervisor_service_account: Annotated[str, Field(pattern=ACCOUNT)] | None = None
    """The account of the supervisor's machine: it makes and removes hosts, and may act as ``service_account``
    (``roles/iam.serviceAccountUser`` on that account alone)."""
    bundle: Annotated[str, Field(pattern=BUNDLE)] | None = None
    """The software of hosts: ``gs://BUCKET/FOLDER/SHA256.tar.gz``, named by its own SHA-256, which hosts check. It
    holds ``requirements.txt`` with hashes, ``wheels/``, and, where the image's Python is below 3.11, ``python/``."""
    image: Annotated[str, Field(pattern=IMAGE)] | None = None
    """The boot image (``projects/P/global/images/NAME`` or ``.../family/NAME``); default: Google's Ubuntu with the GPU
    driver, which holds no torch: it comes with the bundle."""
    subnetwork: Annotated[str, Field(pattern=SUBNETWORK)] | None = None
    """Where hosts and supervisor have their first address (``projects/P/regions/R/subnetworks/NAME``); default:
    ``muster-sub`` of the project in each zone's region. Hosts have to reach each other there: a network of one's own
    lets nothing in by default. With ``resources.private`` it needs Private Google Access."""
    boot_disk_gb: Annotated[int, Field(ge=20, le=64_000)] | None = None
    """Boot disk of each host; default: 200, and twice the weights where their size is known."""
    boot_disk_type: Literal["pd-balanced", "pd-ssd", "pd-standard", "hyperdisk-balanced"] | None = None
    """Default: as the machine needs it."""
    max_wait_hours: Annotated[float, Field(gt=0, le=168)] = 24.0
    """How long a zone may keep a flex-start request waiting before the next zone is asked. Other requests fail at once
    where there are no machines."""
    supervisor_machine: str = "e2-standard-2"
    """The small machine that supervises the run and outlives its hosts."""
    hugging_face_secret: Annotated[str, Field(pattern=SECRET)] | None = None
    """Secret Manager's name of the Hugging Face token, with its version (``projects/P/secrets/NAME/versions/3``)."""
