"""Prices of the user's own: negotiated ones they wrote, and list prices fetched with their credentials.

``<home>/prices.csv`` is the user's and never written by us; ``<home>/prices-google.csv`` is what ``update`` fetched.
The user's row wins over a fetched one, which wins over the one that ships.
"""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from muster import backends
from muster.catalog import billing, rows
from muster.catalog.offers import Option, catalogue
from muster.catalog.rows import Price
from muster.config.spec import RunSpec
from muster.core.errors import AccessError, BackendError, UsageError, install_command
from muster.core.typed_json import JsonObject, children, parse_object
from muster.storage import run_registry

OWN, FETCHED = "prices.csv", "prices-google.csv"
#: Compute Engine in the Cloud Billing Catalog.
SKUS = "https://cloudbilling.googleapis.com/v1/services/6F81-5844-456A/skus"
TIMEOUT_S = 30.0
MAX_PAGES = 100
Fetch = Callable[[str, Mapping[str, str]], JsonObject]


@dataclass(frozen=True, kw_only=True)
class Updated:
    path: Path
    prices: tuple[Price, ...]
    skus: int
    missing: tuple[str, ...]
    """Machines and modes in the catalogue for which no SKU was found."""


def own_prices(home: Path | None = None) -> list[Price]:
    """Fetched prices, then the user's own, so that the latter override."""
    home = home or run_registry.home()
    result: list[Price] = []
    for name in (FETCHED, OWN):
        path = home / name
        if path.exists():
            result += rows.prices_from(path.read_text(encoding="utf-8"), source=str(path))
    return result


def update(home: Path | None = None, *, api_key: str | None = None, fetch: Fetch | None = None) -> Updated:
    """Fetch Google's list prices and write them next to the user's.

    Raises:
        AccessError: no credentials here, or they are refused.
        BackendError: the billing catalogue cannot be reached or answers nonsense.
    """
    home = home or run_registry.home()
    headers, query = credentials(api_key)
    result: list[JsonObject] = []
    token = ""
    for _ in range(MAX_PAGES):
        asked = {**query, "pageSize": "5000", "currencyCode": "USD", **({"pageToken": token} if token else {})}
        page = (fetch or _get)(f"{SKUS}?{urllib.parse.urlencode(asked)}", headers)
        result += children(page, "skus")
        token = str(page.get("nextPageToken", ""))
        if not token:
            break
    now = datetime.now(UTC).date().isoformat()
    prices, missing = billing.prices_of(result, date=now)
    if not prices:
        raise BackendError(f"the billing catalogue's {len(result)} SKUs hold no price that is understood")
    path = home / FETCHED
    run_registry.make_folder(home)
    run_registry.replace_text(path, billing.as_csv(prices))
    return Updated(path=path, prices=tuple(prices), skus=len(result), missing=tuple(missing))


def credentials(api_key: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """(headers, query) that authorise a request: an API key, or application default credentials.

    Raises:
        AccessError: there are none.
    """
    if api_key:
        return {}, {"key": api_key}
    try:
        import google.auth
        import google.auth.exceptions
        import google.auth.transport.requests
    except ImportError as error:
        raise AccessError(
            "no credentials for the billing catalogue: google-auth is not installed and no API key is set",
            hint=f"set MUSTER_BILLING_API_KEY, or {install_command('gcs')} and gcloud auth application-default login",
        ) from error
    try:
        result, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-billing.readonly"])
        result.refresh(google.auth.transport.requests.Request())  # type: ignore[no-untyped-call]
    except google.auth.exceptions.GoogleAuthError as error:
        raise AccessError(
            f"no credentials for the billing catalogue: {str(error).splitlines()[0]}",
            hint="gcloud auth application-default login, or set MUSTER_BILLING_API_KEY; prices stay as they are",
        ) from error
    return {"Authorization": f"Bearer {result.token}"}, {}


def priced(spec: RunSpec, home: Path | None = None) -> RunSpec:
    """``spec`` with its hosts' price by the hour, its back end's fees included, where the file names machine and mode
    and the price is known."""
    resources = spec.resources
    if resources.usd_per_host_hour is not None or resources.machine is None or resources.provisioning_model is None:
        return spec
    machine, mode = rows.machines().get(resources.machine), resources.provisioning_model.removesuffix("_queued")
    if machine is None:
        return spec
    rented = backends.get(spec.backend).market.rents(catalogue(own_prices(home)))
    prices = [option.price for option in rented if option.price is not None]
    known = [price for price in prices if (price.machine, price.mode) == (machine.name, mode)]
    here = [price for price in known if any(_within(place, price.region) for place in resources.locations)]
    if not here and (resources.locations or not known):
        return spec
    # Which of several places it will be is decided later: the dearest keeps the limit.
    usd = max(price.usd_per_gpu_hour for price in here or known) * machine.count
    return spec.model_copy(update={"resources": resources.model_copy(update={"usd_per_host_hour": usd})})


def _within(place: str, region: str) -> bool:
    return place == region or place.startswith(region + "-")


def _get(url: str, headers: Mapping[str, str]) -> JsonObject:
    shown = url.split("?")[0]
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=TIMEOUT_S) as answer:
            return parse_object(answer.read())
    except urllib.error.HTTPError as error:
        kind = AccessError if error.code in (400, 401, 403) else BackendError
        raise kind(f"{shown} answered {error.code} {error.reason}", hint="prices stay as they are") from error
    except (OSError, ValueError) as error:
        raise BackendError(f"{shown} cannot be read: {error}", hint="prices stay as they are") from error


def rentable(*, region: str | None = None, gpu: str | None = None, home: Path | None = None) -> list[Option]:
    """Machines with accelerators that the catalogue knows, by accelerator, the cheapest first, unknown prices last.

    ``region``: only what is priced there (``us-central1``, or a zone of it); ``gpu``: only accelerators with that in
    their name.

    Raises:
        UsageError: none is.
    """
    found = [
        each
        for each in catalogue(own_prices(home))
        if (region is None or _within(region, each.offer.location))
        and (gpu is None or gpu.lower() in each.offer.accelerator.lower())
    ]
    if not found:
        what = " ".join(word for word in (gpu or "", f"in {region}" if region else "") if word)
        raise UsageError(f"the catalogue has no machine: {what}", hint="muster gpus lists all that it has")

    def order(each: Option) -> tuple[str, float]:
        usd = each.offer.usd_per_node_hour
        return each.offer.accelerator, float("inf") if usd is None else usd / each.offer.gpus_per_node

    return sorted(found, key=order)


def all_prices(home: Path | None = None) -> list[Price]:
    """Every price a plan uses, overrides applied, in the catalogue's order."""
    held = {(price.machine, price.mode, price.region): price for price in (*rows.shipped_prices(), *own_prices(home))}
    return list(held.values())
