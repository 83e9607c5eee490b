"""What is installed on the cluster: released manifests, pinned by hash; Kueue's with our settings in its Configuration.

Hashes are of the bytes as they were released: what we change is written from them by this program alone. On this
machine they are in ``~/.muster/manifests``, a folder for each address, and pinned in ``~/.muster/manifests.json``.
"""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.backends.gke.manifests.kueue_configuration import configured, is_kueue
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.catalog import gke as catalogue
from muster.core.errors import BackendError, UsageError
from muster.core.typed_json import JsonObject, child, text
from muster.storage import run_registry

Manifest = JsonObject
Fetch = Callable[[str], bytes]
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Software:
    """Released manifests, parsed."""

    documents: Mapping[str, tuple[Manifest, ...]]
    """Name (``kueue.yaml``) -> its objects."""
    hugging_face_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class Unpinned:
    """A manifest at hand whose hash neither the table nor the user has recorded."""

    name: str
    url: str
    sha256: str

    def sentence(self) -> str:
        return f"{self.name} has sha256 {self.sha256} (released at {self.url})"


def wanted_software(site: Site) -> dict[str, str]:
    """File name -> address it is released at, of everything that this run file's cluster needs."""
    releases = child(catalogue.versions(), "releases")
    fabric = site.placement.machine.fabric
    result = {f"{name}.yaml": text(releases, name, "url") for name in ("jobset", "kueue")}
    if site.placement.machine.gpus:
        result |= {path.rpartition("/")[2]: catalogue.installers_url() + path for path in fabric.installers}
    return result


def software(
    site: Site, texts: Mapping[str, str], *, pins: Mapping[str, str], hugging_face_token: str | None = None
) -> Software:
    """Check the released manifests and parse them. ``pins``: address -> sha256 that the user recorded.

    Raises:
        UsageError: files are missing, do not match the table or a pin, or are not pinned.
    """
    if result := unpinned(site, texts, pins):
        lines = "\n".join(f"  {document.sentence()}" for document in result)
        raise UsageError(
            f"{len(result)} of the manifests that would be applied to the cluster are not pinned by hash:\n{lines}",
            hint="review the files, then the same with --pin records these hashes; later runs compare with them",
        )
    return parsed(site, texts, hugging_face_token=hugging_face_token)


def unpinned(site: Site, texts: Mapping[str, str], pins: Mapping[str, str]) -> list[Unpinned]:
    """Which of the files at hand have no recorded hash.

    Raises:
        UsageError: files are missing, or one is not what the table or a pin says.
    """
    releases = child(catalogue.versions(), "releases")
    result = []
    for name, url in _all_there(site, texts).items():
        digest = sha256(texts[name])
        if known := text(releases, name.removesuffix(".yaml"), "sha256"):
            if digest != known:
                raise UsageError(f"{name} has sha256 {digest}, the release has {known}", hint=f"get it from {url}")
        elif pinned := pins.get(url):
            if digest != pinned:
                raise UsageError(
                    f"{name} has sha256 {digest}, and {pinned} was pinned: what {url} gives has changed",
                    hint="look at the difference; --pin accepts the new one",
                )
        else:
            result.append(Unpinned(name=name, url=url, sha256=digest))
    return result


def parsed(site: Site, texts: Mapping[str, str], *, hugging_face_token: str | None = None) -> Software:
    """The same without a look at hashes, for showing what would be sent.

    Raises:
        UsageError: files are missing, each with the address to get it from.
    """
    from ruamel.yaml import YAML

    documents = {
        name: tuple(document for document in YAML(typ="safe", pure=True).load_all(texts[name]) if document)
        for name in _all_there(site, texts)
    }
    documents = {name: configured(rows) if is_kueue(rows) else rows for name, rows in documents.items()}
    return Software(documents=documents, hugging_face_token=hugging_face_token)


def hashes(site: Site, texts: Mapping[str, str]) -> dict[str, str]:
    """Address -> sha256 of the files at hand: what a pin records."""
    return {url: sha256(texts[name]) for name, url in _all_there(site, texts).items()}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _all_there(site: Site, texts: Mapping[str, str]) -> dict[str, str]:
    requested = wanted_software(site)
    if missing := [name for name in requested if name not in texts]:
        lines = "\n".join(f"  curl -L -o {name} {requested[name]}" for name in missing)
        raise UsageError(f"released manifests are needed:\n{lines}", hint="put them in a folder: --manifests FOLDER")
    return requested


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
