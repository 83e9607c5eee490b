"""Checks of a run file where hosts are processes of this machine: forbidden, missing and unused settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from muster.catalog import libraries
from muster.config.spec import RunSpec
from muster.config.validation import is_remote
from muster.core import environment
from muster.core.errors import Problem, UsageError, install_command
from muster.storage.memory_dir import check_path_length

#: Settings that describe hosts somewhere else.
HOSTS_ELSEWHERE = (
    "accelerator", "machine", "locations", "provisioning_model", "reservation", "project", "cluster", "image", "queue",
    "private", "authorized_networks", "network", "node_service_account", "build_service_account", "storage",
    "image_streaming", "local_ssd",
)  # fmt: skip


#: What Muster's own trainer imports. On another back end they are in the image, or in the nodes' Python.
TRAINING = ("torch", "numpy", "safetensors", "tokenizers", "transformers")


def rules(spec: RunSpec) -> Iterator[Problem]:
    """What cannot hold here, with any installation."""
    if spec.run_dir is not None and is_remote(spec.run_dir):
        yield Problem(key="run_dir", message="must be a folder of this machine", value=spec.run_dir)


def host_checks(spec: RunSpec) -> Iterator[Problem]:
    try:
        check_path_length(environment.current().memory_root, ".", run_id="", host=f"host-{spec.resources.hosts}")
    except UsageError as error:
        yield Problem(key="MUSTER_MEMORY_DIR", message=str(error), hint=error.hint)
    lacking = [name for name in TRAINING if importlib.util.find_spec(name) is None]
    if lacking and spec.command is None:
        message = f"trains on this machine and needs {', '.join(lacking)}: not installed"
        yield Problem(key="backend", message=message, value=spec.backend, hint=install_command("train"))
    elif spec.command is None and spec.model is not None:
        try:
            libraries.refuse(libraries.installed(), attention=spec.model.attention)
        except UsageError as error:
            yield Problem(key="backend", message=str(error), value=spec.backend, hint=error.hint)
    tracker = spec.output.tracker
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        yield Problem(key="output.tracker", message=f"{tracker} is not installed", hint=f"pip install {tracker}")
    if spec.output.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield Problem(key="output.tensorboard", message="is not installed", hint="pip install tensorboard")
    if spec.resources.device == "cuda" and not has_gpu():
        message = "cuda: there is no NVIDIA GPU on this machine"
        yield Problem(key="resources.device", message=message, hint="device: auto")


def unused_settings(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """(key, reason) of settings without effect."""
    for name in HOSTS_ELSEWHERE:
        yield f"resources.{name}", "backend is local: the run uses this machine"
    yield "model.weights", "backend is local: weights are read from this machine's cache"
    if not spec.resources.usd_per_host_hour:
        yield "limits.max_usd", "backend is local, and resources.usd_per_host_hour is not set"


def has_gpu() -> bool:
    """Whether the NVIDIA driver shows a device. No CUDA is touched."""
    return Path("/dev/nvidia0").exists() or bool(list(Path("/proc/driver/nvidia/gpus").glob("*")))
