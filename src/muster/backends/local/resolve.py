"""What this machine decides of a run file: device, ranks per host, price."""

from __future__ import annotations

import importlib.util

from muster.config import validation
from muster.config.spec import RunSpec
from muster.core.errors import Problem, RunFileError, install_command
from muster.core.types import Offer


def resolve(spec: RunSpec, offer: Offer) -> RunSpec:
    """``spec`` with ``offer``'s device and ranks per host.

    Raises:
        RunFileError: the layout does not fit the ranks, there are not as many GPUs, or TPUs lack jax.
    """
    resources = spec.resources
    device = resources.device
    if device == "auto":
        device = "cuda" if offer.gpus_per_node else "cpu"
    hosts = resources.hosts + resources.spare_hosts  # a spare here takes its GPUs from the same machine
    gpus_each = max(1, offer.gpus_per_node // hosts)
    ranks = resources.ranks_per_host or (gpus_each if device == "cuda" else 1)
    usd = resources.usd_per_host_hour or 0.0  # the user's own machine
    resources = resources.model_copy(update={"device": device, "ranks_per_host": ranks, "usd_per_host_hour": usd})
    spec = spec.model_copy(update={"resources": resources})
    problems = validation.problems(spec)
    if device == "cuda" and ranks * hosts > offer.gpus_per_node:
        spares = f" (spares: {resources.spare_hosts})" if resources.spare_hosts else ""
        needed = f"{hosts} hosts{spares} x {ranks} ranks need as many GPUs"
        problems.append(
            Problem(key="resources.ranks_per_host", message=f"{needed}; this machine has {offer.gpus_per_node}")
        )
    if device == "tpu" and importlib.util.find_spec("jax") is None:  # here: a plan for TPUs needs none
        hint = f"{install_command('tpu')}; on a TPU machine also 'jax[tpu]' of that version"
        problems.append(Problem(key="resources.device", message="tpu needs jax: not installed", hint=hint))
    if problems:
        raise RunFileError(problems)
    return spec
