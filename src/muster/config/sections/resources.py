"""Which machines a run needs, how they are bought, and what is built around them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from muster.config.sections.section import NotNegative, Positive, Section

#: An IPv4 or IPv6 range: ``203.0.113.0/24``.
CIDR = r"^[0-9A-Fa-f.:]+/[0-9]{1,3}$"
#: A service account's address, as Google writes it.
ACCOUNT = r"^[a-z0-9-]+@[a-z0-9.-]+$"


class Resources(Section):
    """Which machines, how many."""

    hosts: Positive = 1
    min_hosts: Positive | None = None
    """Continue with as few as this; default: ``hosts``."""
    spare_hosts: NotNegative = 0
    ranks_per_host: Positive | None = None
    """Default: the GPUs of a host; on CPU 1."""
    device: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    """``tpu``: JAX trains, one rank a host; without a TPU on this machine's CPU, which is said."""
    accelerator: str | None = None
    """For example ``B200``, ``H100``, ``H200``."""
    machine: str | None = None
    """For example ``a4-highgpu-8g``."""
    locations: list[str] = Field([])
    """Regions or zones, tried in order."""
    provisioning_model: (
        Literal["owned", "on_demand", "spot", "flex_start", "flex_start_queued", "calendar", "reservation"] | None
    ) = None
    usd_per_host_hour: Annotated[float, Field(ge=0)] | None = None
    """What a host costs; default: the list price of ``machine``, ``mode`` and place where it is known, and nothing on
    your own machine."""
    network_gb_s: Annotated[float, Field(gt=0)] | None = None
    """What the NICs of a host's data network carry together in one direction, GB/s as on the data sheet (8 x 400 Gb/s:
    400). For plans; default: that of ``machine`` in the catalogue."""
    reservation: str | None = None
    project: str | None = None
    cluster: str | None = None
    image: str | None = None
    queue: str | None = None
    """Kueue local queue or Slurm partition."""
    threads_per_rank: Positive | None = None
    """Intra-op threads on CPU; default: the cores divided by the ranks."""
    private: bool = False
    """Nodes without public addresses: Cloud NAT leads out, and ``authorized_networks`` alone reach the control plane.
    Google Cloud only, as are the keys below."""
    authorized_networks: list[Annotated[str, Field(pattern=CIDR)]] = Field([])
    """Address ranges from which the control plane may be reached (``203.0.113.7/32``): with ``private`` there have to
    be some, that of the machine that runs ``muster`` among them. Default: every range, with Google credentials."""
    network: str | None = None
    """An existing VPC network of the project for the cluster's own traffic; default: one that ``up`` makes."""
    node_service_account: Annotated[str, Field(pattern=ACCOUNT)] | None = None
    """An existing account for the nodes; default: one that ``up`` makes, with the least roles."""
    build_service_account: Annotated[str, Field(pattern=ACCOUNT)] | None = None
    """An existing account for image builds; default: one that ``up`` makes, with the least roles."""
    storage: Literal["standard", "anywhere_cache", "rapid"] = "standard"
    """The bucket that ``up`` makes: standard; with a cache in the zone of the GPUs; or a zonal bucket (Rapid)."""
    image_streaming: bool | None = None
    """Start containers while their image is still being read; default: where the node pools support it."""
    local_ssd: NotNegative | None = None
    """Local SSDs of a node for temporary files, weights and images; default: all that the machine brings."""

    @property
    def on_gpus(self) -> bool:
        """Whether ranks use the GPUs of this machine; auto: where the driver's device file is. Neither torch nor the
        driver is touched."""
        return self.device == "cuda" or (self.device == "auto" and Path("/dev/nvidiactl").exists())

    @property
    def on_cpu(self) -> bool:
        """Whether ranks compute on the CPU of this machine."""
        return self.device in ("cpu", "auto") and not self.on_gpus
