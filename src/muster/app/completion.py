"""What a shell's completion offers. What these need is imported when it asks."""

from __future__ import annotations


def run_ids(incomplete: str) -> list[str]:
    """Runs of this user, the newest first."""
    from muster.storage import run_registry

    found = {run_id: path.stat().st_mtime for run_id, path in run_registry.registry() if path.is_dir()}
    return [name for name in ("last", *sorted(found, key=lambda each: -found[each])) if name.startswith(incomplete)]


def key_paths(incomplete: str) -> list[str]:
    from muster.config.schema_keys import every_key

    paths = sorted({path for places in every_key().values() for path in places})
    return [f"{path}=" for path in paths if path.startswith(incomplete)]
