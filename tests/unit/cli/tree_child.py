"""The other end of a pseudo-terminal: ``quick`` ends soon, ``stuck`` never gets its cluster."""

import os
import signal
import sys
import threading
import time

import typer

from muster.app.cluster.progress_tree import Began, Changed, Planned, Said
from muster.cli.tree import watched


def work(progress):
    names = [f"subnetworks/sub-{n}" for n in range(12)]
    nodes = [Planned(key="networks/net"), *(Planned(key=name, needs=("networks/net",)) for name in names)]
    nodes.append(Planned(key="clusters/c", needs=("networks/net",)))
    progress(Began(title="making what is missing in z", making=True, nodes=tuple(nodes)))
    for step in ("looking", "making", "waiting", "waiting", "there"):
        for node in nodes:
            if sys.argv[1] == "stuck" and step not in ("looking", "making"):
                threading.Event().wait()
            progress(Changed(key=node.key, step=step, text="w" * 100 if sys.argv[1] == "stuck" else ""))
        time.sleep(0.1)
        progress(Said(text="said in between"))
    return 7


if os.isatty(2):
    os.close(os.open(os.ttyname(2), os.O_RDWR))  # the first terminal that a new session opens is its own
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print(watched(work, again="muster up run.yaml", undo="muster down run.yaml"), flush=True)
except typer.Exit as left:
    raise SystemExit(left.exit_code) from None
