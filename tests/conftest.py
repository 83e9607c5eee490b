"""Makes what lies beside it importable: ``from fakes.gcs import GcsFake``. Soak tests run only when asked for.

Among several workers (``-n``) live tests go first: their files take up to minutes each, and what is short fills the
gaps at the end. xdist's own order is by the number of tests in a file, which says nothing about its length.
"""

from pathlib import Path

LIVE = Path(__file__).parent / "live"


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config, items):
    """Without ``soak`` in ``-m`` the long tests are left out, whatever else is chosen."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LIVE not in item.path.parents)
    if "soak" in (config.option.markexpr or ""):
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]
