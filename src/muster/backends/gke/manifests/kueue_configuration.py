"""Kueue's own Configuration: the one that ``muster up`` installs, and what another one does to a run. Pure.

Kueue 0.19 waits for all pods of what it admits, also where its Configuration has no word about it: a run whose pods
are not ready 30 minutes after its admission, or that has been a host short for 30 minutes, is evicted with every pod.
A queued pool never replaces a lost host, so a run that goes on with its spare would always end so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence

from muster.backends.gke.manifests import yaml_text
from muster.core.errors import UsageError
from muster.core.typed_json import Json, JsonObject, at, changed, child, children, text, texts

NAMESPACE = "kueue-system"
CONFIG_MAP = "kueue-manager-config"
KEY = "controller_manager_config.yaml"
DEPLOYMENT = "kueue-controller-manager"
ANNOTATION = "muster/kueue-configuration-sha256"
"""Of the Deployment's pods: the file is mounted by subPath and never read again, so another text needs new pods."""
WAIT: Mapping[str, Json] = {"timeout": "8760h", "recoveryTimeout": "0s"}
"""The timeout ends only once every pod has been ready at the same time, spares and the stand-by too: a run that trains
without one of them is under it to its end, so it has to be longer than any run. 0 would be taken as none given, 30
minutes; a recoveryTimeout of 0 switches that one off (pkg/controller/core/core.go, waitForPodsReady)."""
LONGEST_RUN_S = 8760 * 3600.0
CLAIMS_OFF: Mapping[str, bool] = {
    "KueueDRAIntegration": False,
    "KueueDRAIntegrationExtendedResource": False,
    "KueueDRAIntegrationPartitionableDevices": False,
    # Else Kueue refuses what it does not account for.
    "KueueDRARejectWorkloadsWhenDRADisabled": False,
}
"""Some machines have their NICs by resource claims, a host all of its node's: GPUs are quota enough. From 0.18 on Kueue
counts claims too, and never admits those of a device class that its Configuration does not map."""
CLAIMS_HINT = (
    "in Kueue's Configuration (kueue-system/kueue-manager-config) featureGates: {"
    + ", ".join(f"{name}: false" for name in CLAIMS_OFF)
    + "} (before 0.18: {DynamicResourceAllocation: false}), then restart its Deployment; muster up does so on clusters "
    "that it made"
)
CLAIMS_REFUSED = (
    "is not mapped in DRA configuration",
    "uses DRA resources but the KueueDRAIntegration feature gate is not enabled",
)
"""Parts of Kueue's messages about such a run (0.18 and later)."""
GATES: Mapping[str, bool] = {
    **CLAIMS_OFF,
    "TASFailedNodeReplacement": False,
    "TASFailedNodeReplacementFailFast": False,
    "TASReplaceNodeOnPodTermination": False,
    "TASReplaceNodeOnNodeTaints": False,
    # The only thing that ends a pod on a node that hangs: its Job starts no other pod before.
    "FailureRecoveryPolicy": True,
}
"""All four of TAS: the second and third need the first, and Kueue refuses to start where one of them is alone
(pkg/config/validation.go, LoadAndValidateFeatureGates). Those of claims depend on each other in the same way."""
READY_S = 1800.0
Release = tuple[int, int, int]
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:h|ms|m|s))+|0")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def is_kueue(documents: Sequence[JsonObject]) -> bool:
    """Whether a released manifest installs Kueue's manager."""
    return any(_is(row, "Deployment", DEPLOYMENT) for row in documents)


def configured(documents: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
    """Kueue's released manifest with our settings in its Configuration, and the Configuration's hash on its pods.

    Raises:
        UsageError: the manifest holds no Configuration, or none that we can read.
    """
    found = next((row for row in documents if _is(row, "ConfigMap", CONFIG_MAP)), None)
    before = parsed(text(found, "data", KEY)) if found is not None else None
    if before is None:
        raise UsageError(
            f"Kueue's manifest has no ConfigMap {CONFIG_MAP} with a Configuration under {KEY}",
            hint="get the released one again: without our settings Kueue evicts a run that lost a host",
        )
    after = {**before, "waitForPodsReady": WAIT, "featureGates": {**child(before, "featureGates"), **GATES}}
    written = yaml_text.dump([after])
    digest = hashlib.sha256(written.encode()).hexdigest()
    return tuple(
        changed(row, written, "data", KEY)
        if row is found
        else changed(row, digest, "spec", "template", "metadata", "annotations", ANNOTATION)
        if _is(row, "Deployment", DEPLOYMENT)
        else row
        for row in documents
    )


def parsed(written: str) -> dict[str, Json] | None:
    """The Configuration in a text; None where there is none."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found = YAML(typ="safe", pure=True).load(written)
    except (YAMLError, ValueError, RecursionError):  # ValueError: a number or a date that is none
        return None
    return found if isinstance(found, dict) and found.get("kind") == "Configuration" else None


def evictions(
    configuration: JsonObject,
    *,
    arguments: Sequence[str] = (),
    release: Release | None = None,
    topology: bool,
    lasts_s: float = LONGEST_RUN_S,
) -> list[str]:
    """How Kueue with this Configuration ends a run that is a host short or slow to start, one phrase each.

    ``arguments`` are the manager's own, which may set feature gates too; ``release`` is its version, None: as 0.19;
    ``topology``: the run's nodes may be assigned by topology-aware scheduling; ``lasts_s``: seconds that it holds its
    nodes at most.
    """
    gates = _gates(configuration, arguments, release or (0, 19, 0))
    result = []
    start_s, recovery_s = _limits(configuration, release or (0, 19, 0))
    if gates.get("DisableWaitForPodsReady"):
        start_s = recovery_s = None
    if start_s is not None and start_s < lasts_s:
        result.append(f"a run whose pods are not all ready {_minutes(start_s)} after its admission is evicted")
    if recovery_s is not None:
        result.append(f"a run that is a host short for {_minutes(recovery_s)} is evicted, also where a spare trains on")
    if topology and gates["TASFailedNodeReplacementFailFast"]:
        result.append("a run placed by topology is evicted when a node is lost and no other is free at once")
    elif topology:
        # No gate is asked when a lost pod, not a node's own state, leads Kueue to the node (node_controller.go).
        result.append("a run placed by topology is evicted when a second node is lost before the first is replaced")
    return result


def claims_refusal(
    configuration: JsonObject,
    *,
    arguments: Sequence[str] = (),
    release: Release | None = None,
    classes: Collection[str],
    covered: Collection[str] | None,
) -> str | None:
    """Why Kueue never admits a run whose claims are of these device classes; None: it does.

    ``covered``: resources of the run's queue; None: not known, and taken to be enough.
    """
    release = release or (0, 19, 0)
    gates = _gates(configuration, arguments, release)
    if release < (0, 18):
        accounts = gates.get("DynamicResourceAllocation", False)
    else:
        accounts = gates.get("KueueDRAIntegration", True)
        if not accounts and gates.get("KueueDRARejectWorkloadsWhenDRADisabled", True):
            return "it refuses resource claims while its gate KueueDRAIntegration is off"
    mappings = children(configuration, "resources", "deviceClassMappings")
    mapped = {device: text(row, "name") for row in mappings for device in texts(row, "deviceClassNames")}
    for device in sorted(classes) if accounts else ():
        if device not in mapped:
            return f"it counts resource claims, and its deviceClassMappings do not name device class {device}"
        if covered is not None and mapped[device] not in covered:
            return f"it counts device class {device} as {mapped[device]}, which the queue does not cover"
    return None


def matches_by_own_keys(release: Release) -> bool:
    """Whether this Kueue compares a pod's selector with a flavour by that flavour's own label keys alone, so that the
    supervisor's names no key of the hosts' flavour and fits it (flavorassigner.go, checkFlavorForPodSets)."""
    return release >= (0, 19) or (0, 18, 2) <= release < (0, 19) or (0, 17, 6) <= release < (0, 18)


def _limits(configuration: JsonObject, release: Release) -> tuple[float | None, float | None]:
    """(start, recovery) of waitForPodsReady in seconds as it acts; None: no limit."""
    block = configuration.get("waitForPodsReady")
    if text(configuration, "apiVersion").endswith("/v1beta1"):
        if at(block, "enable") is not True:
            return None, None
    elif release < (0, 19) and not isinstance(block, Mapping):
        return None, None
    start_s = _seconds(at(block, "timeout")) or READY_S
    recovery_s = _seconds(at(block, "recoveryTimeout"))
    if recovery_s is None and not (text(configuration, "apiVersion").endswith("/v1beta1") and release < (0, 15)):
        recovery_s = start_s
    return start_s, recovery_s or None


def _gates(configuration: JsonObject, arguments: Sequence[str], release: Release) -> dict[str, bool]:
    """The gates that matter here, with their defaults: on since 0.14, but for the one that switches timers off."""
    on = release >= (0, 14)
    result = {"DisableWaitForPodsReady": False, **{name: on for name in GATES if name.startswith("TAS")}}
    for argument in arguments:
        name, _, value = argument.lstrip("-").partition("=")
        if name == "feature-gates":
            rows = (row.partition("=") for row in value.split(","))
            result |= {gate.strip(): setting.strip().lower() == "true" for gate, _, setting in rows}
    return result | {name: value is True for name, value in child(configuration, "featureGates").items()}


def release_of(deployment: JsonObject) -> Release | None:
    """Kueue's version by its manager's image: ``.../kueue:v0.19.2`` is (0, 19, 2)."""
    for container in children(deployment, "spec", "template", "spec", "containers"):
        if found := re.search(r":v(\d+)\.(\d+)\.(\d+)", text(container, "image")):
            return int(found[1]), int(found[2]), int(found[3])
    return None


def arguments_of(deployment: JsonObject) -> list[str]:
    """What the manager is started with."""
    rows = children(deployment, "spec", "template", "spec", "containers")
    return [word for row in rows for word in (*texts(row, "command"), *texts(row, "args"))]


def _seconds(duration: Json) -> float | None:
    """Of a duration as Go writes it (``1h30m``); None where it is none."""
    if not isinstance(duration, str) or not _DURATION.fullmatch(duration):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)(ms|h|m|s)", duration))


def _minutes(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.0f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def _is(row: JsonObject, kind: str, name: str) -> bool:
    return row.get("kind") == kind and text(row, "metadata", "name") == name
