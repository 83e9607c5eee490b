"""``systemctl`` on a machine of namespaces, whose process 1 is no systemd: three verbs, and one unit as its file says.

It keeps to what the unit of ``startup.sh`` rests on: Environment=, ExecStart=, Restart=on-failure with RestartSec=, and
``restart``, which ends the program and everything it started (KillMode=mixed: SIGTERM to the first, SIGKILL to all).
Where the program ends by itself, or is killed, what it started is killed too, before it is started again.
``journal`` is where output goes. /etc/systemd/environment stands for DefaultEnvironment= of system.conf.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

UNITS = Path("/etc/systemd/system")
JOURNAL = Path("/var/log/journal.txt")
STATE = Path("/run/unit.pid")
KNOWN = {"Description", "StartLimitIntervalSec", "Environment", "ExecStart", "Restart", "RestartSec", "KillMode",
         "TimeoutStopSec", "OOMPolicy", "LimitNOFILE", "LimitMEMLOCK"}  # fmt: skip


def unit(name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (UNITS / name).read_text().splitlines():
        if line and not line.startswith(("[", "#")):
            key, _, value = line.partition("=")
            if key not in KNOWN:
                raise SystemExit(f"Unknown key {key} in {name}")
            found[key] = value
    if found["Restart"] != "on-failure" or not found["ExecStart"].startswith("/"):
        raise SystemExit(f"{name} is not what this stand-in can keep alive: {found}")
    return found


def stop() -> None:
    try:
        leader = int(STATE.read_text())
        os.killpg(leader, signal.SIGTERM)
        time.sleep(0.5)
        os.killpg(leader, signal.SIGKILL)
    except (OSError, ValueError):
        pass


SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER``: orphans below this process become its children."""


def kill_rest() -> None:
    """Everything that is still below this process: systemd knows it by its control group."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def keep(name: str) -> None:
    """In a session of its own; its children are in its process group."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setpgid(0, 0)
    STATE.write_text(str(os.getpid()))
    output = os.open(JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    while True:
        asked = unit(name)
        environ = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        defaults = Path("/etc/systemd/environment")
        for text in [defaults.read_text() if defaults.exists() else "", asked["Environment"]]:
            environ |= dict(word.split("=", 1) for word in shlex.split(text))
        # What is ignored stays ignored in a child: the program's own SIGTERM is the usual one.
        child = subprocess.Popen(
            shlex.split(asked["ExecStart"]), env=environ,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        )  # fmt: skip
        print(f"systemd: started {name}, process {child.pid}", flush=True)
        code = child.wait()
        print(f"systemd: {name} ended with {code}", flush=True)
        kill_rest()
        if code == 0:
            os._exit(0)
        time.sleep(float(asked["RestartSec"]))


def main() -> None:
    words = sys.argv[1:]
    if words == ["daemon-reload"]:
        return
    if words == ["poweroff"]:
        with JOURNAL.open("a") as journal:
            print("systemd: powering off", file=journal, flush=True)
        stop()  # whoever asks is among them
        return
    if len(words) != 2 or words[0] != "restart":
        raise SystemExit(f"this stand-in does not know: systemctl {words}")
    unit(words[1])
    stop()
    keep(words[1])


if __name__ == "__main__":
    main()
