"""Ports for programs that must be told theirs before they bind it."""

import random
import socket

#: Below the kernel's own choice (32768 and up, ip(7)), which another test's connection could take meanwhile.
RANGE = range(15_000, 30_000)


def free_port() -> int:
    """One that nothing on this machine listens on now. Two processes hardly ever choose the same."""
    source = random.SystemRandom()
    while True:
        port = source.choice(RANGE)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
