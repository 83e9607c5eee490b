"""How a run ended, by its newest supervisor's file: whatever became of that."""

from pathlib import Path

from muster.core.event_log import EventLog
from muster.storage.run_output import verdict


def finish(run_dir: Path, term: int, outcome: str) -> EventLog:
    log = EventLog("r", run_dir / "events", "supervisor", term)
    log.append("run.finished", detail={"outcome": outcome, "exit_code": 1, "reason": f"term {term}"})
    log.close()
    return log


def reason(run_dir: Path) -> str | None:
    found = verdict(run_dir)
    return found.reason if found is not None else None


def test_the_newest_terms_word_counts(tmp_path: Path) -> None:
    assert reason(tmp_path) is None
    for term in (2, 9, 10):
        finish(tmp_path, term, "stopped")
        assert reason(tmp_path) == f"term {term}"
    assert verdict(tmp_path, since_wall_ns=2**62) is None


def test_damage_after_the_end_hides_it_not(tmp_path: Path) -> None:
    log = finish(tmp_path, 1, "failed")
    for rest in (b"no event\n", b'{"kind":"run.finished"\n', b'{"kind":"run.finished","detail":{}}\n', b'"run.fin'):
        with open(log.path, "ab") as file:
            file.write(rest)
        assert reason(tmp_path) == "term 1"


def test_a_second_part_belongs_to_its_term(tmp_path: Path) -> None:
    log = finish(tmp_path, 10, "failed")
    log.path.write_bytes(b"no event\n" + log.path.read_bytes())
    assert reason(tmp_path) == "term 10", "the part that follows says nothing yet"
    second = finish(tmp_path, 10, "stopped")
    assert second.name == "supervisor.part2.10.jsonl"
    found = verdict(tmp_path)
    assert found is not None and found.outcome == "stopped"
    finish(tmp_path, 9, "failed")
    assert verdict(tmp_path) == found
