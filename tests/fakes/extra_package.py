"""Another package, as far as families of plug-ins are concerned: a module and its entry points on ``sys.path``."""

from pathlib import Path

import pytest

from muster.core.registry import Registry


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry, name: str, target: str, files: dict[str, str]
) -> None:
    """A package with ``files`` that adds ``name`` (``target``: ``"module:attribute"``) to the registry's family."""
    added = folder / f"{name}-1.0.dist-info"
    added.mkdir()
    (added / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (added / "entry_points.txt").write_text(f"[{registry.group}]\n{name} = {target}\n")
    for file, text in files.items():
        (folder / file).write_text(text)
    monkeypatch.syspath_prepend(folder)
    # Entry points that were looked up before are forgotten, for this test alone.
    monkeypatch.delitem(registry.__dict__, "_added", raising=False)
    monkeypatch.setitem(registry.__dict__, "_added", Registry._added.func(registry))
