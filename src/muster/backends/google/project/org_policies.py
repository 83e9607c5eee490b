"""Rules of an organisation that refuse what ``up`` makes, and what of the run file answers to them."""

from __future__ import annotations

from muster.core.errors import MusterError

ANSWERS = {
    "compute.vmExternalIpAccess": "resources.private: true makes nodes without public addresses",
    "gcp.restrictNonCmekServices": "keys of one's own (CMEK) for disks, buckets and images are not supported: "
    "an exception for this project, or a cluster, bucket and repository made by hand (--adopt)",
    "iam.disableServiceAccountCreation": "name accounts that are there: resources.node_service_account and "
    "resources.build_service_account",
    "compute.requireShieldedVm": "--adopt a cluster whose node pools have secure boot",
}
"""Constraint -> hint."""


def explained(error: MusterError) -> MusterError:
    """The same error, with the hint for the constraint that its text names."""
    for constraint, answer in ANSWERS.items():
        if constraint in str(error):
            return type(error)(str(error), hint=answer)
    return error
