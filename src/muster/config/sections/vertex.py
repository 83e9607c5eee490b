"""What only a custom job on Vertex AI needs; machines, regions, mode, image and project are in ``resources``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from muster.config.sections.resources import ACCOUNT
from muster.config.sections.section import NotNegative, Section

NETWORK = r"^projects/[0-9]+/global/networks/[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"
ATTACHMENT = r"^projects/[a-z0-9.:-]+/regions/[a-z0-9-]+/networkAttachments/[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"
TENSORBOARD = r"^projects/[a-z0-9.:-]+/locations/[a-z0-9-]+/tensorboards/[0-9]+$"
#: With its version: ``latest`` may be another secret at the next start.
SECRET = r"^projects/[a-z0-9.:-]+/secrets/[A-Za-z0-9_-]{1,255}/versions/[1-9][0-9]*$"


class Vertex(Section):
    """How a custom job is asked for on Vertex AI (``backend: vertex``)."""

    service_account: Annotated[str, Field(pattern=ACCOUNT)] | None = None
    """The account that hosts act as. It reads the run's secrets, reads and writes its bucket, and writes logs
    (``roles/logging.logWriter``: without it all output is lost, and nothing says so)."""
    max_wait_hours: Annotated[float, Field(gt=0, le=168)] | None = None
    """How long a region may keep the request waiting before it is cancelled and the next region asked; default: 24 with
    flex-start, else 2. Vertex itself waits without limit where quota is used up."""
    boot_disk_gb: Annotated[int, Field(ge=100, le=64_000)] | None = None
    """Disk of each host for its image, temporary files and weights; default: 200, and twice the weights where their
    size is known."""
    boot_disk_type: Literal["pd-ssd", "pd-standard", "hyperdisk-balanced"] | None = None
    """Default: as the machine needs it."""
    network: Annotated[str, Field(pattern=NETWORK)] | None = None
    """A VPC network to peer with, by the project's number (``projects/12345/global/networks/NAME``); default: none,
    and Google's way to the internet."""
    network_attachment: Annotated[str, Field(pattern=ATTACHMENT)] | None = None
    """In place of ``network``: an attachment for a private interface
    (``projects/P/regions/R/networkAttachments/NAME``)."""
    hugging_face_secret: Annotated[str, Field(pattern=SECRET)] | None = None
    """Secret Manager's name of the Hugging Face token, with its version (``projects/P/secrets/NAME/versions/3``)."""
    tensorboard: Annotated[str, Field(pattern=TENSORBOARD)] | None = None
    """A Vertex AI TensorBoard that shows the run (``projects/P/locations/R/tensorboards/NUMBER``)."""
    reduction_servers: NotNegative | Literal["auto"] = 0
    """Machines of Google's Reduction Server, which add up gradients where the network is plain TCP; 0: none; ``auto``:
    as many as the hosts' network needs where they help (replicas on three hosts or more, no GPUDirect, no flex-start).
    The image must have the package ``google-reduction-server``."""
    web_access: bool = False
    """A shell in the browser for each host, behind Google's sign-in; the image needs bash."""
