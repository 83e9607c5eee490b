"""How much of what is alike a test tries: a sample in CI, all of it in the nightly suite."""

import os

#: Set by ``./setup.sh nightly``.
THOROUGH = bool(os.environ.get("MUSTER_THOROUGH"))


def usually(number: int, *, nightly: int) -> int:
    """How many to try, or every how many."""
    return nightly if THOROUGH else number
