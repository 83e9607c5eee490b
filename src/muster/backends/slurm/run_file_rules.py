"""Checks of a run file for Slurm. Pure: nothing asks Slurm."""

from __future__ import annotations

from collections.abc import Iterator

from muster.config.sections.slurm import Container
from muster.config.spec import RunSpec
from muster.config.validation import is_remote
from muster.core.errors import Problem

_IMAGE = "slurm.container.image"


def rules(spec: RunSpec) -> Iterator[Problem]:
    """What cannot hold on any Slurm cluster."""
    if spec.run_dir is not None and is_remote(spec.run_dir):
        yield Problem(
            key="run_dir",
            message="must be a folder that all nodes share",
            value=spec.run_dir,
            hint="checkpoint.dir may be in a bucket",
        )
    if (container := spec.slurm.container) is None:
        return
    if spec.run_dir is not None and set(spec.run_dir) & set(",:"):
        yield Problem(
            key="run_dir", message="holds a comma or a colon, which separate mounts of a container", value=spec.run_dir
        )
    yield from _enroot(container) if container.runtime == "pyxis" else _apptainer(container)
    for index, mount in enumerate(container.mounts):
        if message := _wrong_mount(mount, container.runtime):
            yield Problem(
                key=f"slurm.container.mounts.{index}",
                message=message,
                value=mount,
                hint="SOURCE:TARGET[:OPTIONS], whole paths; one entry of the list per mount",
            )


def _enroot(container: Container) -> Iterator[Problem]:
    """``[USER@][REGISTRY#]IMAGE[:TAG]`` or a squashfs file; of enroot before 4.0, ``#`` alone ends a registry."""
    image = container.image
    if image.startswith("/") or image.startswith("dockerd://"):
        return
    if image.startswith(".") or image.endswith((".sqsh", ".squashfs")):
        yield Problem(
            key=_IMAGE,
            message="must be a whole path: the step begins in the run's folder",
            value=image,
            hint="a .sqsh file of `enroot import` in a folder that all nodes share",
        )
        return
    name = image.removeprefix("docker://")
    registry, sign, rest = name.partition("#")
    first, slash, path = (registry if sign else name).partition("/")
    if sign and slash:
        message = "has its # behind the first /"
        yield Problem(key=_IMAGE, message=message, value=image, hint=f"{first}#{path}/{rest}")
    elif not sign and slash and (set(first.rpartition("@")[2]) & set(".:") or first == "localhost"):
        yield Problem(
            key=_IMAGE,
            message="enroot reads it as an image of Docker Hub: # must follow the registry",
            value=image,
            hint=f"{first}#{path}",
        )


def _apptainer(container: Container) -> Iterator[Problem]:
    """A file or folder, or a URI: ``docker://nvcr.io/nvidia/pytorch:25.03-py3``."""
    image = container.image
    if image.startswith("/") or ("://" in image and "#" not in image):
        return
    plain = image.partition("://")[2] or image
    if image.endswith(".sif") or image.startswith("."):
        hint = "a .sif file in a folder that all nodes share"
        yield Problem(
            key=_IMAGE, message="must be a whole path: the step begins in the run's folder", value=image, hint=hint
        )
        return
    message = "has enroot's # after the registry" if "#" in image else "must be a whole path or a URI for apptainer"
    yield Problem(key=_IMAGE, message=message, value=image, hint="docker://" + plain.replace("#", "/"))


def _wrong_mount(mount: str, runtime: str) -> str | None:
    if "," in mount:
        return "holds a comma, which separates mounts"
    source, *rest = mount.split(":")
    if len(rest) > 2:
        return "has more than three parts"
    special = runtime == "pyxis" and source in ("tmpfs", "umount")
    if not special and not source.startswith("/"):
        return "its source must be a whole path"
    if rest and not rest[0].startswith("/"):
        return "its target must be a whole path"
    return None
