"""Kueue 0.19.2's own Configuration: what it refuses to start with, and what one means with the defaults filled in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CONFIG_MAP = ("kueue-system", "kueue-manager-config", "controller_manager_config.yaml")
"""Where a cluster keeps it: namespace and name of the ConfigMap, and the key."""
FIELDS = {
    "apiVersion", "kind", "namespace", "manageJobsWithoutQueueName", "managedJobsNamespaceSelector",
    "internalCertManagement", "waitForPodsReady", "clientConnection", "integrations", "multiKueue", "fairSharing",
    "admissionFairSharing", "resources", "featureGates", "objectRetentionPolicies", "visibilityServer", "webhook",
    "leaderElection", "metrics", "health", "pprofBindAddress", "controller", "tls",
}  # fmt: skip
WAIT_FIELDS = {"timeout", "blockAdmission", "requeuingStrategy", "recoveryTimeout"}
STRATEGY_FIELDS = {"timestamp", "backoffLimitCount", "backoffBaseSeconds", "backoffMaxSeconds"}
ON = {
    "PartialAdmission", "FlavorFungibility", "VisibilityOnDemand", "PrioritySortingWithinCohort",
    "FairSharingPreemptWithinNominal", "FairSharingPrioritizeNonBorrowing", "MultiKueue", "TopologyAwareScheduling",
    "LocalQueueMetrics", "TASProfileMixed", "HierarchicalCohorts", "AdmissionFairSharing", "ObjectRetentionPolicies",
    "TASFailedNodeReplacement", "ElasticJobsViaWorkloadSlices", "TASFailedNodeReplacementFailFast",
    "TASReplaceNodeOnPodTermination", "SkipReassignmentForPodOwnedWorkloads",
    "ManagedJobsNamespaceSelectorAlwaysRespected", "TASAssignmentsEncodingByHostnamePrefix", "KueueDRAIntegration",
    "KueueDRAIntegrationExtendedResource", "KueueDRARejectWorkloadsWhenDRADisabled",
    "KueueDRAIntegrationPartitionableDevices", "MultiKueueAdaptersForCustomJobs", "ReclaimablePods",
    "PropagateBatchJobLabelsToWorkload", "SkipFinalizersForPodsSuspendedByParent", "MultiKueueWaitForWorkloadAdmitted",
    "MultiKueueRedoAdmissionOnEvictionInWorker", "TLSOptions", "RemoveFinalizersWithStrictPatch",
    "TASReplaceNodeOnNodeTaints", "AssignQueueLabelsForPods", "TASMultiLayerTopology", "SchedulingEquivalenceHashing",
    "AdmissionGatedBy", "FinishOrphanedWorkloads", "MultiKueueIncrementalDispatcherConfig",
    "MultiKueueIncrementalDispatcherRespectConfigOrder", "QuotaCheckStrategy", "MetricForWorkloadCreationLatency",
    "WorkloadIdentifierAnnotations", "MetricsForCohorts", "CleanupProvisioningRequestsOnEviction",
    "TASHandleOverlappingFlavors", "TASRecomputeAssignmentWithinSchedulingCycle",
    "DeferRayServiceFinalizationForRedisCleanup", "TASCacheNodeMatchResults", "TASCachingRemainingResources",
    "VectorizedResourceRequests", "WorkloadValidateResourcesAreNonNegative", "TASValidateWorkloadSliceSize",
    "WorkloadValidationForPodSetMetadata", "LWSImmutableGroupSize", "FlavorFungibilityPreserveScanProgress",
    "SkipAncestorCheckForDeletedWorkloads", "MultiKueueRemoteSpecSync", "PodIntegrationValidateGroupOwner",
    "ValidateRayAndSparkJobUpdates",
}  # fmt: skip
OFF = {
    "DisableWaitForPodsReady", "ElasticJobsViaWorkloadSlicesWithTAS", "TASReplaceNodeDueToNotReadyOverFixedTime",
    "TASBalancedPlacement", "KueueDRAIntegrationConsumableCapacity", "WorkloadRequestUseMergePatch",
    "MultiKueueAllowInsecureKubeconfigs", "MultiKueueKubeConfigPathValidation", "MultiKueueClusterProfile",
    "FailureRecoveryPolicy", "SchedulerLongRequeueInterval", "SchedulerTimestampPreemptionBuffer",
    "CustomMetricLabels", "SparkApplicationIntegration", "MultiKueueOrchestratedPreemption", "PriorityBoost",
    "ShortWorkloadNames", "FastQuotaReleaseInPodIntegration", "RejectUpdatesToCQWithInvalidOnFlavors",
    "ConcurrentAdmission", "TASRespectNodeAffinityPreferred", "MultiKueueManagerQuotaAutomation",
    "WorkloadPriorityClassDefaulting", "UnadmittedWorkloadsObservability", "UnadmittedWorkloadsExplicitStatus",
    "TASCacheTopologyTree", "SchedulerLibraryIntegration", "PrioritizePreemptorWorkloads",
    "RecomputeAssignmentUponPreemptionTargetsOverlap",
}  # fmt: skip
LOCKED = {
    "HierarchicalCohorts", "ObjectRetentionPolicies", "ManagedJobsNamespaceSelectorAlwaysRespected",
    "MultiKueueAllowInsecureKubeconfigs", "PropagateBatchJobLabelsToWorkload",
    "SkipFinalizersForPodsSuspendedByParent", "MultiKueueWaitForWorkloadAdmitted",
    "MultiKueueRedoAdmissionOnEvictionInWorker",
}  # fmt: skip
_TAS, _REPLACE = "TopologyAwareScheduling", "TASFailedNodeReplacement"
NEEDS = {
    "TASProfileMixed": (_TAS,), "TASHandleOverlappingFlavors": (_TAS,), "TASFailedNodeReplacement": (_TAS,),
    "TASFailedNodeReplacementFailFast": (_TAS, _REPLACE), "TASReplaceNodeOnPodTermination": (_TAS, _REPLACE),
    "TASReplaceNodeDueToNotReadyOverFixedTime": (_TAS, _REPLACE), "TASBalancedPlacement": (_TAS,),
    "TASReplaceNodeOnNodeTaints": (_TAS,), "TASMultiLayerTopology": (_TAS,),
    "TASRespectNodeAffinityPreferred": (_TAS,), "TASRecomputeAssignmentWithinSchedulingCycle": (_TAS,),
    "UnadmittedWorkloadsExplicitStatus": ("UnadmittedWorkloadsObservability",),
    "ElasticJobsViaWorkloadSlicesWithTAS": ("ElasticJobsViaWorkloadSlices", _TAS),
    "KueueDRAIntegrationExtendedResource": ("KueueDRAIntegration",),
    "KueueDRAIntegrationPartitionableDevices": ("KueueDRAIntegration",),
    "KueueDRAIntegrationConsumableCapacity": ("KueueDRAIntegration",),
}  # fmt: skip
READY_TIMEOUT_S = 1800.0


def kueue_config_refusals(configuration: Mapping[str, Any]) -> list[str]:
    """Why Kueue's manager would end at its start; its pods then crash, and no queued JobSet is taken any more."""
    found = []
    if configuration.get("apiVersion") not in ("config.kueue.x-k8s.io/v1beta2", "config.kueue.x-k8s.io/v1beta1"):
        found.append(f"apiVersion {configuration.get('apiVersion')!r}")
    if configuration.get("kind") != "Configuration":
        found.append(f"kind {configuration.get('kind')!r}")
    found += [f"{one}: unknown field" for one in configuration if one not in FIELDS]
    found += _wait(configuration.get("waitForPodsReady") or {})
    if not (configuration.get("integrations") or {}).get("frameworks", ["batch/job"]):
        found.append("integrations.frameworks: cannot be empty")
    return [*found, *_gates(configuration.get("featureGates") or {})]


def _wait(block: Mapping[str, Any]) -> Iterator[str]:
    strategy = block.get("requeuingStrategy") or {}
    yield from (f"waitForPodsReady.{one}: unknown field" for one in block if one not in WAIT_FIELDS)
    yield from (f"waitForPodsReady.requeuingStrategy.{one}: unknown field" for one in strategy
                if one not in STRATEGY_FIELDS)  # fmt: skip
    for name in ("timeout", "recoveryTimeout"):
        if block.get(name) is not None:
            value = seconds(block[name])
            if value is None or value < 0:
                yield f"waitForPodsReady.{name}: {block[name]!r} is no duration of 0 or more"
    for name in ("backoffLimitCount", "backoffBaseSeconds", "backoffMaxSeconds"):
        if (strategy.get(name) or 0) < 0:
            yield f"waitForPodsReady.requeuingStrategy.{name}: below 0"


def _gates(asked: Mapping[str, Any]) -> Iterator[str]:
    for name, value in asked.items():
        if name not in ON | OFF:
            yield f"featureGates: {name}: there is no such gate"
        elif not isinstance(value, bool):
            yield f"featureGates: {name}: want true or false, got {value!r}"
        elif name in LOCKED and value != (name in ON):
            yield f"featureGates: {name} is locked to {str(name in ON).lower()}"
    now = gates_of({"featureGates": asked})
    for name, needed in NEEDS.items():
        for other in needed:
            if now[name] and not now[other]:
                yield f"featureGates: {name} requires {other} to be enabled"


@dataclass(frozen=True, kw_only=True)
class ReadyLimits:
    """How long Kueue waits for the pods of what it admitted before it evicts; 0: for ever."""

    start_s: float
    recovery_s: float
    backoff_base_s: float
    backoff_most_s: float
    most_requeues: int | None


def gates_of(configuration: Mapping[str, Any]) -> dict[str, bool]:
    """Every feature gate with its default, but for those that are set."""
    return {**dict.fromkeys(ON, True), **dict.fromkeys(OFF, False), **(configuration.get("featureGates") or {})}


def ready_limits(configuration: Mapping[str, Any]) -> ReadyLimits:
    """waitForPodsReady as it acts: on where nobody wrote a word about it, 30 minutes where the timeout is 0."""
    block = configuration.get("waitForPodsReady") or {}
    strategy = block.get("requeuingStrategy") or {}
    start = seconds(block.get("timeout") or "0s") or READY_TIMEOUT_S
    recovery = start if block.get("recoveryTimeout") is None else seconds(block["recoveryTimeout"])
    if gates_of(configuration)["DisableWaitForPodsReady"]:
        start = recovery = 0.0
    assert recovery is not None
    return ReadyLimits(
        start_s=start,
        recovery_s=recovery,
        backoff_base_s=strategy.get("backoffBaseSeconds", 60),
        backoff_most_s=strategy.get("backoffMaxSeconds", 3600),
        most_requeues=strategy.get("backoffLimitCount"),
    )


def seconds(duration: str) -> float | None:
    """Go's way to write one (``1h30m``, ``0s``); None where it is none."""
    found = re.fullmatch(r"(-?)((?:\d+(?:\.\d+)?(?:h|m|s|ms))+|0)", str(duration))
    if found is None:
        return None
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|h|m|s)", found[2])
    return (-1 if found[1] else 1) * sum(float(number) * units[unit] for number, unit in parts)
