"""A file of events that has a hole of 64 GiB instead of a line's end is damaged, and costs no memory."""

import pytest

from muster.core.errors import BackendError
from muster.core.event_log import EventLog, EventReader, heads
from muster.storage.store.local import LocalStore


@pytest.fixture
def holed(tmp_path):
    log = EventLog("r", tmp_path, "host-0", 1)
    log.append("run.message", detail={"text": "fine"})
    log.close()
    with open(log.path, "ab") as file:
        file.truncate(64 << 30)
    return log.path


def test_it_is_reported_and_not_read(holed):
    reader = EventReader(holed.parent)
    assert len(list(reader.read())) <= 1 and [one.reason for one in reader.damaged] == [
        "cannot be read: a line of it has more than 16,777,216 bytes"
    ]
    assert heads(holed.parent, run_id="r") == {}
    with pytest.raises(BackendError, match="it has 68,719,476,736 bytes"):
        LocalStore().get(str(holed))
