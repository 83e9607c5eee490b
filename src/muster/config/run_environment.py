"""``env`` and ``secrets`` of the run file: what may stand there, and where a secret's value is taken from.

The run file names secrets and holds none: ``secrets: {WANDB_API_KEY: env, HF_TOKEN: "file:~/.hf_token"}``. A value is
read where the run is submitted, unless the back end has Google's Secret Manager read by the hosts themselves.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from muster.config.backends import BACKENDS
from muster.config.sections.vertex import SECRET
from muster.config.spec import RunSpec
from muster.core.errors import Problem, UsageError
from muster.core.redact import gives_away, secret_word

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SOURCE = re.compile(r"env|env:[A-Za-z_][A-Za-z0-9_]*|file:.+")
#: Set for each rank, or before the fork of ranks (``agent.ranks.rank_environment``, ``rank.fork_server``).
_OURS = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM",
}  # fmt: skip
THREADS = "OMP_NUM_THREADS"
MOST_BYTES = 64 << 10
"""Of a secret. The kernel takes 128 KiB for one variable, Secret Manager 64 KiB."""


def problems(spec: RunSpec) -> Iterator[Problem]:
    """Names that are none or Muster's own, secrets in clear, and sources that the back end cannot read."""
    places = (("env", spec.env), ("secrets", spec.secrets), ("slurm.environment", spec.slurm.environment))
    for section, variables in places:
        for name, value in variables.items():
            key = f"{section}.{name}"
            if section != "slurm.environment":
                yield from _name_problems(key, name)
            if section != "secrets" and gives_away(name, value):
                hint = f"secrets: {{{name}: env}} takes it from the environment in which you submit"
                yield Problem(
                    key, "looks like a secret, and would stand in clear in run.yaml and resolved.json", hint=hint
                )
            elif "\0" in value:
                yield Problem(key, "holds a NUL byte, which no variable can")
    capabilities = BACKENDS.get(spec.backend).capabilities
    for key, given in (("workdir", spec.workdir), ("setup", spec.setup)):
        if isinstance(given, str) and not capabilities.ships_code:
            hint = "put it into the image" + (", or give setup as argument lists" if key == "setup" else "")
            yield Problem(key, f"{given} does not reach hosts of {spec.backend}", hint=hint)
    yield from _setup_problems(spec.setup if isinstance(spec.setup, list) else [])
    managed = capabilities.secret_manager
    for name, source in spec.secrets.items():
        key = f"secrets.{name}"
        if name in spec.env:
            yield Problem(key, f"{name} is in `env` too", hint="remove one")
        if managed and not re.match(SECRET, source):
            hint = "projects/PROJECT/secrets/NAME/versions/NUMBER"
            yield Problem(key, f"on {spec.backend} a secret is one of Secret Manager's", hint=hint)
        elif not managed and re.match(SECRET, source):
            yield Problem(key, f"Secret Manager is not read on {spec.backend}", hint="env, env:OTHER_NAME or file:PATH")
        elif not managed and not _SOURCE.fullmatch(source):  # not shown: it may be the secret itself
            yield Problem(key, "does not say where the value is", hint="env, env:OTHER_NAME or file:PATH")


def _setup_problems(setup: list[list[str]]) -> Iterator[Problem]:
    for index, argv in enumerate(setup):
        if not argv or not argv[0]:
            yield Problem(f"setup.{index}", "names no program", hint="for example [pip, install, einops]")
        elif any("\0" in word for word in argv):
            yield Problem(f"setup.{index}", "holds a NUL byte, which no argument can")
        elif secret_word(argv) is not None:
            message = "looks like a secret, and would stand in clear in run.yaml, resolved.json and every `ps`"
            yield Problem(f"setup.{index}", message, hint="secrets: {NAME: env}: its programs have the variable NAME")


def _name_problems(key: str, name: str) -> Iterator[Problem]:
    if not _NAME.fullmatch(name):
        yield Problem(key, f"{name!r} is no name of a variable", hint="letters, digits and _, no digit first")
    elif name in _OURS or name.startswith(("MUSTER_", "TORCHELASTIC_")):
        yield Problem(key, f"{name} is set by Muster, for each rank", hint="remove it")
    elif name == THREADS:
        yield Problem(key, "is set for each rank", hint="resources.threads_per_rank")


def read_secrets(sources: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Name -> value of the secrets that are read here; those of Secret Manager are left to the hosts.

    Raises:
        UsageError: a variable is not set, or a file is not there or open to others.
    """
    found = {}
    for name, source in sources.items():
        kind, _, given = source.partition(":")
        if kind == "env":
            variable = given or name
            if not environ.get(variable):
                raise UsageError(
                    f"secrets.{name}: the variable {variable} is not set here",
                    hint=f"export {variable}=..., or secrets.{name}=file:PATH",
                )
            found[name] = environ[variable]
        elif kind == "file":
            found[name] = _of_file(name, Path(os.path.expanduser(given)))
    return found


def _of_file(name: str, path: Path) -> str:
    """A file's text without the line's end."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"secrets.{name}: {path} is not a file")
        if status.st_mode & 0o077:
            mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
            raise UsageError(f"secrets.{name}: others can read {path} ({mode})", hint=f"chmod 600 {path}")
        if status.st_size > MOST_BYTES:
            raise UsageError(f"secrets.{name}: {path} has {status.st_size} bytes, a secret has {MOST_BYTES} at most")
        value = path.read_bytes().decode().rstrip("\r\n")
    except OSError as error:
        raise UsageError(f"secrets.{name}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"secrets.{name}: {path} is not UTF-8 text") from error
    if not value or "\0" in value:
        raise UsageError(f"secrets.{name}: {path} is empty or holds a NUL byte")
    return value
