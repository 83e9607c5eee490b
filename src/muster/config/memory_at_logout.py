"""Whether this machine deletes a user's files in /dev/shm at logout, and with them the snapshots of a run.

systemd's login manager does, for all but system users, when the last session of a user ends, unless it is configured
not to (``RemoveIPC`` in logind.conf(5)) or the user lingers (loginctl(1)).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from pathlib import Path

from muster.core import environment

SHARED_MEMORY = Path("/dev/shm")
#: systemd's SYSTEM_UID_MAX is 999 as it ships.
FIRST_USER = 1000
#: Where a configuration is looked for, the strongest first.
_PLACES = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd")
_SETTING = re.compile(r"^\s*(?P<comment>#?)\s*RemoveIPC\s*=\s*(?P<value>\w+)\s*$", re.MULTILINE)
_NO = ("no", "n", "false", "f", "off", "0")


def doubts() -> tuple[str, ...]:
    """What a person who starts a run here should know; empty where nothing is deleted."""
    return find(environment.current().memory_root, uid=os.getuid())


def find(memory_root: Path, *, uid: int, system: Path = Path("/")) -> tuple[str, ...]:
    """``doubts`` for a folder of snapshots and a user. ``system``: the root of the file system, in tests another."""
    if not memory_root.is_relative_to(SHARED_MEMORY) or uid < FIRST_USER or not _removes(system):
        return ()
    user = str(uid)
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(uid).pw_name
    if (system / "var/lib/systemd/linger" / user).exists():
        return ()
    return (
        f"this machine empties {SHARED_MEMORY} when you log out (systemd's RemoveIPC): the run goes on and loses its "
        "snapshots in memory; `loginctl enable-linger` keeps them, or RemoveIPC=no in logind.conf",
    )


def _removes(system: Path) -> bool:
    if not (system / "run/systemd/system").is_dir():  # as sd_booted(3): another init, or a container
        return False
    value = "yes"
    main = next((path for place in _PLACES if (path := system / place / "logind.conf").is_file()), None)
    if main is not None:  # its comments are the defaults that it was built with: Red Hat's are others
        value = _value(main, value, comments=True)
    snippets: dict[str, Path] = {}
    for place in reversed(_PLACES):
        snippets.update({path.name: path for path in (system / place / "logind.conf.d").glob("*.conf")})
    for _, path in sorted(snippets.items()):
        value = _value(path, value)
    return value.lower() not in _NO


def _value(path: Path, before: str, *, comments: bool = False) -> str:
    """The last setting in the file; a comment counts where there is none."""
    try:
        found = [(match["comment"], match["value"]) for match in _SETTING.finditer(path.read_text(errors="replace"))]
    except OSError:
        return before
    given = [value for comment, value in found if not comment]
    return (given or [value for _, value in found if comments] or [before])[-1]
