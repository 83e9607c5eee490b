"""Preemption notices, from a server that answers as Compute Engine's metadata server does."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
from fakes.metadata import change, metadata

from muster.protocol.codec import reader_of
from muster.protocol.pipes import PREEMPTION_NOTICES, PreemptionNotice


@contextmanager
def listening(url):
    argv = [sys.executable, "-m", "muster.agent.preemption_watcher", url]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("key, value", [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")])
def test_a_notice_is_printed_when_the_value_changes(key, value):
    with metadata() as (server, url), listening(url) as child:
        change(server, "maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
        change(server, key, value)
        notice = reader_of(PREEMPTION_NOTICES)(child.stdout.readline().encode())
        assert notice == PreemptionNotice(notice=key, value=value)


def test_where_no_metadata_server_answers_it_ends_silently():
    with metadata(genuine=False) as (_, url), listening(url) as child:
        out, _ = child.communicate(timeout=60)
        assert (child.returncode, out) == (0, "")
