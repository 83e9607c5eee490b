"""Where a process listens, from the kernel: of any network namespace."""

import contextlib
import ipaddress
import os
import struct
from pathlib import Path

LISTEN = "0A"


def listeners(pid):
    """The addresses of the TCP sockets on which ``pid`` accepts connections."""
    held = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTEN and f"socket:[{words[9]}]" in held:
                    found.add(_address(words[1].split(":")[0]))
    return found


def _address(text):
    """The kernel writes an address as 32-bit words of the machine's own byte order."""
    raw = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return str(ipaddress.ip_address(raw))
