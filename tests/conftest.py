"""Makes what lies beside it importable: ``from fakes.gcs import GcsFake``. Soak tests run only when asked for."""


def pytest_collection_modifyitems(config, items):
    """Without ``soak`` in ``-m`` the long tests are left out, whatever else is chosen."""
    if "soak" in (config.option.markexpr or ""):
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]
