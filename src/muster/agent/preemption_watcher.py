"""Listens to the cloud's metadata server for a preemption or a maintenance that ends this host.

A program of its own (``python -m muster.agent.preemption_watcher URL``), since it waits in long requests. It prints one
message (``PreemptionNotice``) for each notice. Where no metadata server answers it ends silently.

Compute Engine's keys: ``instance/preempted`` (TRUE once a Spot machine is being taken) and
``instance/maintenance-event`` (TERMINATE_ON_HOST_MAINTENANCE an hour to a minute ahead for machines with GPUs);
``wait_for_change`` holds the request until the value changes.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import urllib.error
import urllib.request

from muster.protocol.codec import encode
from muster.protocol.pipes import PreemptionNotice

#: key under /computeMetadata/v1/instance/ -> the value that is reported. The first comes seconds ahead and is acted on
#: at once; the second up to an hour ahead, and is only logged: there is time to move the run.
KEYS = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
#: The server holds a request this long; the answer is waited for a little longer.
HOLD_S = 60
RETRY_S = 2.0
#: Without an answer in this many tries there is no metadata server.
TRIES = 3


def read(url: str, key: str, *, last_etag: str | None) -> tuple[str, str | None]:
    """(value, etag) of one key; with ``last_etag`` only once it has changed, or the hold is over.

    Raises:
        OSError: no answer.
    """
    wait = f"?wait_for_change=true&timeout_sec={HOLD_S}&last_etag={last_etag}" if last_etag else ""
    request = urllib.request.Request(
        f"{url}/computeMetadata/v1/instance/{key}{wait}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy's answer is another machine's
    with opener.open(request, timeout=HOLD_S + 10) as answer:
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise OSError("not a metadata server")
        return answer.read(1000).decode("utf-8", "replace").strip(), answer.headers.get("ETag")


def listen(url: str, key: str) -> None:
    """Print a line once ``key`` says that the host will end, then return; return too where there is no server."""
    etag, misses, answered = None, 0, False
    while misses < TRIES or answered:
        try:
            value, etag = read(url, key, last_etag=etag)
            misses, answered = 0, True
        except (OSError, ValueError):
            misses += 1
            time.sleep(RETRY_S)
            continue
        if value == KEYS[key]:
            sys.stdout.write(encode(PreemptionNotice(notice=key, value=value)).decode() + "\n")
            sys.stdout.flush()
            return
        if etag is None:
            time.sleep(RETRY_S)


def main() -> None:
    parser = argparse.ArgumentParser(description="listen for preemption notices (started by the agent)")
    parser.add_argument("url", help="the metadata server")
    url = parser.parse_args().url.rstrip("/")
    threads = [threading.Thread(target=listen, args=(url, key), daemon=True) for key in KEYS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
