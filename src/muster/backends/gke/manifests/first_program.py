"""What runs in a container before Muster's own program: the shell line that waits for the data network. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# A constant program: everything that varies arrives as "$0" and "$@", so nothing is ever quoted into it. The arguments
# are put aside because a sourced script sees them. Where it fails, or its last command is false, the agent starts all
# the same, and what is set after it wins over what it says. 75: the pod ends for nothing, and another one waits anew.
WAIT = """\
script=$0 words=("$@")
trap 'exit 75' TERM
for ((waited = 0; waited < 600; waited++)); do
  [[ -r $script ]] && break
  ((waited % 30)) || echo "waiting for $script: the installer of the data network's libraries has not put it here" >&2
  sleep 1
done
[[ -r $script ]] || { echo "error: $script did not come in 600 s: look at the installers in kube-system" >&2; exit 75; }
"""
SOURCE_AND_RUN = f"""\
{WAIT}source "$script";
set -- "${{words[@]}}"
while [[ $1 != -- ]]; do export "$1"; shift; done
shift
trap - TERM
exec "$@"
"""
WAIT_AND_RUN = f"""\
{WAIT}trap - TERM
exec "${{words[@]}}"
"""
# Kubernetes puts no sum into an environment: a host of a slice is numbered here. $0: hosts of a slice.
NUMBER_AND_RUN = """\
host=host-$((MUSTER_HOST_INDEX * $0 + JOB_COMPLETION_INDEX))
for word in "$@"; do
  [[ $word == host-of-slice ]] && word=$host
  words+=("$word")
done
exec "${words[@]}"
"""
HOST_OF_SLICE = "host-of-slice"


def numbering(hosts: int, command: Sequence[str]) -> list[str]:
    """``command`` with the host's name for ``HOST_OF_SLICE``: slices are Jobs of ``hosts`` pods each."""
    return ["/bin/bash", "-c", NUMBER_AND_RUN, str(hosts), *command]


def sourcing(script: str, overrides: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """``command`` after ``script`` of the node, with ``overrides`` set anew behind it."""
    words = [f"{name}={value}" for name, value in overrides.items()]
    return ["/bin/bash", "-c", SOURCE_AND_RUN, script, *words, "--", *command]


def waiting(path: str, command: Sequence[str]) -> list[str]:
    """``command`` once ``path`` of the node is there, with an environment that needs no script."""
    return ["/bin/bash", "-c", WAIT_AND_RUN, path, *command]
