"""Use case of ``muster image``: the image of a run file, checked against one table and built by Cloud Build."""

from __future__ import annotations

from dataclasses import dataclass

from muster.app.cluster.up_down import place_of
from muster.backends.gke.image import Doubt, context, doubts, parts, tag
from muster.backends.gke.google.http import Call, GoogleHttp, Http
from muster.backends.gke.provision.build import Build
from muster.backends.gke.google.session import Session
from muster.config.spec import RunSpec
from muster.core.clock import SystemClock
from muster.core.errors import UsageError
from muster.core.protocols import Clock


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image that could be built."""

    build: Build
    doubts: tuple[Doubt, ...]

    @property
    def name(self) -> str:
        return self.build.image

    def calls(self) -> list[Call]:
        return self.build.calls()


def image_of(
    spec: RunSpec,
    *,
    zone: str | None = None,
    base: str | None = None,
    torch: str | None = None,
    torch_index: str | None = None,
) -> Image:
    """The image for the run file's machine: its name says what it is made of. Touches nothing.

    Raises:
        UsageError: parts that do not fit each other, or the run file has no place.
    """
    where = place_of(spec, zone=zone)
    made_of = parts(base=base, torch=torch, torch_index=torch_index)
    found = doubts(made_of, where.placement.family, where.placement.machine)
    if wrong := [one.message for one in found if one.wrong]:
        raise UsageError("these do not fit: " + "; ".join(wrong), hint="--base, --torch-index")
    data = context(made_of)
    build = Build(site=where, parts=made_of, tag=tag(made_of, data), data=data)
    return Image(build=build, doubts=tuple(found))


def build(image: Image, *, http: Http | None = None, clock: Clock | None = None) -> bool:
    """Build it and wait; False where it was there already.

    Raises:
        BackendError, AccessError: the build failed, or may not be made.
    """
    return image.build.run(Session(http=http or GoogleHttp(), clock=clock or SystemClock()))
