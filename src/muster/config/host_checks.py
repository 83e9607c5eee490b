"""What a run file needs of the machine that reads it: files, folders, packages, and what its back end asks."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

from muster.config.backends import BACKENDS
from muster.config.sections.sources import glob_of
from muster.config.spec import CHAT_TEMPLATES, RunSpec
from muster.config.validation import config_problems, is_remote, looks_local, within
from muster.core.errors import Problem, install_command


def problems(spec: RunSpec) -> list[Problem]:
    """What is missing here. Looks, changes nothing."""
    return [*_files(spec), *_folders(spec), *_packages(spec), *BACKENDS.get(spec.backend).checks.on_this_machine(spec)]


def _files(spec: RunSpec) -> Iterator[Problem]:
    for index, source in enumerate(spec.data.sources if spec.data else []):
        for name, path in source.files.items():
            if not is_remote(path) and not _exists(glob_of(path)):
                yield Problem(f"data.sources.{index}.{name}", f"no file {path}")
    if spec.data is not None and (file := spec.data.chat_template_file) is not None and not _exists(file):
        yield Problem(
            "data.chat_template", f"no file {file}", hint=f"{', '.join(CHAT_TEMPLATES)}, a file, or 'from MODEL'"
        )
    model = spec.model
    if model is not None and model.source is not None and looks_local(model.source):
        yield from _model_folder(spec, model.source)
    if model is not None and isinstance(model.config, str):
        yield from _config_file(spec, model.config)
    tokenizer = model.tokenizer if model is not None else None
    if isinstance(tokenizer, str) and looks_local(tokenizer) and not _exists(tokenizer):
        yield Problem("model.tokenizer", f"no folder {tokenizer}")
    yield from _own_code(spec)
    if spec.recovery.policy.endswith(".py") and not _exists(spec.recovery.policy):
        yield Problem("recovery.policy", f"no file {spec.recovery.policy}")


def _own_code(spec: RunSpec) -> Iterator[Problem]:
    place = "" if spec.workdir is None else f" in {spec.workdir}"
    if spec.workdir is not None and not os.path.isdir(os.path.expanduser(spec.workdir)):
        yield Problem("workdir", f"no folder {spec.workdir}")
    elif spec.command and not _found_there(spec, spec.command[0]) and _own_file(spec, spec.command[0]) is None:
        hint = 'paths start where you are; it begins with the script itself: ["train.py", "--flag"] or ["-m", "module"]'
        yield Problem("command", f"no file {spec.command[0]}{place}", hint=hint)
    if isinstance(spec.setup, str):
        file = _own_file(spec, spec.setup)
        if file is None:
            yield Problem("setup", f"no file {spec.setup}{place}", hint="or argument lists: [[pip, install, einops]]")
        elif not os.access(file, os.X_OK) or Path(file).read_bytes()[:2] != b"#!":
            hint = f"chmod +x {spec.setup}, and a first line as #!/bin/bash"
            yield Problem("setup", f"{spec.setup} is no executable script", hint=hint)


def _found_there(spec: RunSpec, script: str) -> bool:
    """A module, or a script of the image that ranks run in: an absolute path, which this machine need not have."""
    if script == "-m" or spec.workdir is not None or not os.path.isabs(script):
        return script == "-m"
    return BACKENDS.get(spec.backend).checks.image(spec) is not None


def _own_file(spec: RunSpec, path: str) -> str | None:
    """Where the run's own file lies here; with a work folder only what that holds is shipped."""
    if spec.workdir is None:
        file = os.path.expanduser(path)
        return file if os.path.isfile(file) else None
    inside = within(spec.workdir, path)
    return inside and os.path.join(os.path.expanduser(spec.workdir), inside)


def _model_folder(spec: RunSpec, source: str) -> Iterator[Problem]:
    folder = Path(os.path.expanduser(source))
    if not os.path.exists(folder):
        yield Problem("model.source", f"no folder {source}", hint="or a hub id: owner/name")
    elif (folder / "run_id").is_file():
        return  # a run: its weights are exported at submission, which says what is wrong with it
    elif not (folder / "config.json").is_file():
        yield Problem("model.source", f"{source} holds no config.json")
    elif not list(folder.glob("*.safetensors")):
        yield Problem(
            "model.source",
            f"{source} holds no *.safetensors",
            hint="to start from random weights: model.config=" + str(folder / "config.json"),
        )
    else:
        yield from _config_file(spec, str(folder / "config.json"), key="model.source")


def _config_file(spec: RunSpec, path: str, *, key: str = "model.config") -> Iterator[Problem]:
    if not _exists(path):
        yield Problem(key, f"no file {path}")
        return
    try:
        config = json.loads(Path(os.path.expanduser(path)).read_text())
    except (OSError, ValueError) as error:
        yield Problem(key, f"{path} is not JSON: {error}")
        return
    if isinstance(config, dict):
        yield from config_problems(spec, config, key=key)


def _folders(spec: RunSpec) -> Iterator[Problem]:
    places = [("run_dir", spec.run_dir), ("checkpoint.dir", spec.checkpoint.dir)]
    if spec.data is not None:
        places.append(("data.cache_dir", spec.data.cache_dir))
    for key, place in places:
        if place is None or is_remote(place):
            continue
        folder = Path(os.path.expanduser(place))
        if os.path.exists(folder) and not folder.is_dir():
            yield Problem(key, f"{place} is a file, not a folder")
            continue
        parent = next((path for path in (folder, *folder.absolute().parents) if os.path.exists(path)), Path("/"))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            yield Problem(key, f"cannot write in {parent}", hint="choose another folder")


def _packages(spec: RunSpec) -> Iterator[Problem]:
    for index, source in enumerate(spec.data.sources if spec.data else []):
        for package, extra in source.packages.items():
            if importlib.util.find_spec(package) is None:
                message, hint = f"needs {package}, which is not installed", install_command(extra)
                yield Problem(f"data.sources.{index}", message, hint=hint)


def _exists(path: str) -> bool:
    expanded = os.path.expanduser(path)
    # Path.exists raises for a long name, Path.expanduser for an unknown user.
    return os.path.exists(expanded) or (glob.has_magic(path) and bool(glob.glob(expanded, recursive=True)))
