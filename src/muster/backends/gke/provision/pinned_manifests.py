"""Released manifests on this machine: fetched, looked at by a person, and pinned by their hash.

::

    ~/.muster/manifests/0123abcd/kueue.yaml    what was fetched, a folder for each address
    ~/.muster/manifests.json                   {"pins": {address: {"sha256": ..., "since": ...}}}
"""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.gke.provision.software import wanted_software
from muster.core.errors import BackendError, UsageError
from muster.storage import run_registry

Fetch = Callable[[str], bytes]
TIMEOUT_S = 60.0


def at_hand(site: Site, folder: Path | None) -> dict[str, str]:
    """Name -> text of those that lie in the folder, or without one, of those that were fetched before."""
    result = {}
    for name, url in wanted_software(site).items():
        path = folder / name if folder is not None else _kept(url, name)
        if path.is_file():
            result[name] = path.read_bytes().decode(errors="replace")
    return result


def fetch_missing(site: Site, fetch: Fetch | None = None) -> list[str]:
    """Get those that were not fetched before; returns a line for each one that was.

    Raises:
        BackendError: an address does not answer.
    """
    lines = []
    for name, url in wanted_software(site).items():
        path = _kept(url, name)
        if path.is_file():
            continue
        try:
            data = (fetch or _fetch)(url)
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise BackendError(
                f"cannot get {url}: {error}", hint="get it elsewhere, and give --manifests FOLDER"
            ) from error
        run_registry.make_folder(path.parent)
        run_registry.replace_text(path, data.decode(errors="replace"))
        lines.append(f"{url} is now {path}")
    return lines


def pins() -> dict[str, str]:
    """Address -> sha256 that the user recorded.

    Raises:
        UsageError: the file of pins cannot be read.
    """
    try:
        rows = json.loads(_pins_file().read_text(encoding="utf-8"))["pins"]
        return {str(url): str(row["sha256"]) for url, row in rows.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{_pins_file()} is not a file of pinned manifests: {error}", hint="remove it, and pin again"
        ) from error


def pin(hashes: Mapping[str, str], *, day: str) -> Path:
    """Record these (address -> sha256), over what was recorded before; returns the file."""
    path = _pins_file()
    before = json.loads(path.read_text(encoding="utf-8"))["pins"] if pins() else {}
    new = {url: {"sha256": digest, "since": day} for url, digest in hashes.items() if pins().get(url) != digest}
    run_registry.make_folder(path.parent)
    run_registry.replace_text(path, json.dumps({"version": 1, "pins": {**before, **new}}, indent=1) + "\n")
    return path


def _pins_file() -> Path:
    return run_registry.home() / "manifests.json"


def _kept(url: str, name: str) -> Path:
    return run_registry.home() / "manifests" / hashlib.sha256(url.encode()).hexdigest()[:8] / name


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        result: bytes = answer.read()
        return result
