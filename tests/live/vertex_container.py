"""A container of a custom job: the host program as process 1 of its namespaces; what only Google has is replaced.

``python vertex_container.py HOSTS_FILE NAME ARGUMENT...``: names of the hosts resolve by the file, this machine is
called NAME, and ``MUSTER_TEST_SECRETS`` is where Secret Manager answers. Everything else is the program as it is.
"""

import os
import socket
import subprocess
import sys

from muster.backends.google import secret_manager
from muster.backends.vertex import host


def main():
    hosts_file, name, *words = sys.argv[1:]
    subprocess.run(["mount", "--bind", hosts_file, "/etc/hosts"], check=True)
    socket.sethostname(name)
    secret_manager.ROOT = os.environ["MUSTER_TEST_SECRETS"]
    sys.argv = ["host", *words]
    return host.main()


if __name__ == "__main__":
    raise SystemExit(main())
