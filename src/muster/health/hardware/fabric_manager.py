"""``systemctl status nvidia-fabricmanager``, and the version that the service's own lines name."""

from __future__ import annotations

import re

from muster.health.verdicts import Finding, Verdict

_ACTIVE = re.compile(r"^\s*Active: (\S+)(?: \((.*?)\))?(?= |$).*\n", re.MULTILINE)
_VERSION = re.compile(r"[Ff]abric ?[Mm]anager version(?: is)? ?: ?(\d+(?:\.\d+)+)\b")


def is_fabric_manager(text: str) -> bool:
    return re.search(r"nvidia-fabricmanager\.service|[Uu]nit nvidia-fabricmanager", text) is not None


def judge_fabric_manager(text: str, *, host: str = "", driver: str = "") -> Finding:
    """Whether it runs, and whether it is of the driver's version exactly, where both are known.

    Without it, GPUs behind NVSwitch answer CUDA error 802, "system not yet initialized" (NVIDIA Fabric Manager guide).
    """
    check, source = "fabric_manager", "NVIDIA Fabric Manager user guide"
    active, version = _ACTIVE.search(text), _VERSION.search(text)
    if re.search(r"could not be found|Loaded: not-found", text):
        message = "no fabric manager is installed: none is needed without NVSwitch"
        return Finding(check=check, verdict=Verdict.NOTE, host=host, message=message)
    if active is None:
        message = "the status of the fabric manager is not whole"
        return Finding(check=check, verdict=Verdict.INCOMPLETE, host=host, message=message)
    line = active[0].strip()
    if active[1] != "active" or active[2] != "running":
        return Finding(
            check=check, verdict=Verdict.DRAIN, host=host, message="the fabric manager does not run", evidence=line,
            value=active[1], expected="active (running)", source=source,
            command="systemctl restart nvidia-fabricmanager",
        )  # fmt: skip
    if version and driver and version[1] != driver:
        return Finding(
            check=check, verdict=Verdict.DRAIN, host=host, evidence=version[0], value=version[1], expected=driver,
            message=f"the fabric manager is {version[1]} and the driver {driver}: they must be equal", source=source,
        )  # fmt: skip
    return Finding(check=check, verdict=Verdict.HEALTHY, host=host, message="the fabric manager runs", evidence=line)
