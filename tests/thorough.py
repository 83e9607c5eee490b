"""How much of what is alike a test tries: a sample in CI, all of it in the nightly suite."""

import os

#: Set by ``./setup.sh nightly``.
THOROUGH = bool(os.environ.get("MUSTER_THOROUGH"))


def sampled(few: int, *, all_of: int) -> int:
    """How many to try."""
    return all_of if THOROUGH else few
