"""Containers' output as a kubelet serves it: followed, with times, from a time on. Standard library only."""

import threading
import time

from server import now


class Output:
    """``writes`` says whether the container of a log still runs."""

    def __init__(self, writes):
        self.writes = writes
        self.lock = threading.Lock()
        self.stamps: dict[str, list[str]] = {}

    def read(self, path, query):
        """The log's lines; with ``follow`` until the container has ended."""
        seen, number, rest = 0, 0, b""
        stamped, since = query.get("timestamps") == ["true"], query.get("sinceTime", [""])[0]
        while True:
            living = query.get("follow") == ["true"] and self.writes(path)
            with open(path, "rb") as file:
                file.seek(seen)
                chunk = file.read()
            seen += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            lines = [line + b"\n" for line in lines]
            for line in lines if living else [*lines, *([rest] if rest else [])]:
                stamp = self._stamp(path.name, number)
                number += 1
                if stamp >= since[:19]:
                    yield stamp.encode() + b" " + line if stamped else line
            if not living:
                return
            time.sleep(0.1)

    def _stamp(self, name, number):
        """When a line was first read here: no log of ours holds its lines' times."""
        with self.lock:
            found = self.stamps.setdefault(name, [])
            while len(found) <= number:
                found.append(now(True))
            return found[number]
