"""A run that was stopped and is continued knows what it had saved: an older snapshot that a killed host left in memory
is not taken in its place (seen by ``muster accept``: 41 saved steps were redone)."""

from muster.core.event_log import EventLog
from muster.core.event_log.reader import EventReader
from muster.supervise.replay.rebuild_state import rebuild_state


def test_the_last_save_is_known_after_the_end(tmp_path):
    host, supervisor = EventLog("r", tmp_path, "host-0", 2), EventLog("r", tmp_path, "supervisor", 1)
    saved = {"bytes": 1, "duration_ns": 1, "stall_ns": 1, "tier": "disk", "uri": str(tmp_path / "step-103")}
    host.append("checkpoint.committed", step=103, rank=0, detail=saved)
    ended = {"outcome": "stopped", "exit_code": 130, "reason": "muster stop", "final_step": 103}
    supervisor.append("run.finished", detail=ended)
    for log in (host, supervisor):
        log.close()
    assert rebuild_state(event for _, event in EventReader(tmp_path).read()).saves.committed_step == 103
