"""What a host's ranks write reaches its pod's own output: this host's files alone, whole lines, each with its name."""

import json

import pytest

from muster.backends.log_forwarder import LONGEST_BYTES, LogForwarder, severity_of, writer_of
from muster.storage import run_output


def started(rank, attempt):
    return json.dumps({"kind": "rank.started", "rank": rank, "attempt": attempt}) + "\n"


def made(tmp_path):
    for folder in ("logs", "events"):
        (tmp_path / folder).mkdir()
    out = bytearray()
    return LogForwarder(run_dir=tmp_path, host="host-2-abcde", out=out.extend), out


def test_lines_of_this_hosts_ranks_and_programs_and_of_no_other(tmp_path):
    forwarder, out = made(tmp_path)
    (tmp_path / "logs" / "rank-4.a1.log").write_text("early\nhal")
    (tmp_path / "logs" / "rank-0.a1.log").write_text("another host's\n")
    (tmp_path / "logs" / "prepare-host-2-abcde.log").write_text("tokens\n")
    forwarder.add_files({"rank-4.a1.log", "rank-0.a1.log", "prepare-host-2-abcde.log", "prepare-host-2.log"})
    forwarder.copy()
    assert out == b"prepare-host-2-abcde | tokens\n", "whose rank it is has not been said yet"
    (tmp_path / "events" / "host-2-abcde.1.jsonl").write_text(started(4, 1))
    forwarder.add_files({"host-2-abcde.1.jsonl"})
    forwarder.copy()
    with open(tmp_path / "logs" / "rank-4.a1.log", "a") as file:
        file.write("f\nlast")
    forwarder.copy()
    forwarder.copy()
    assert out.decode().splitlines()[1:] == ["rank-4.a1 | early", "rank-4.a1 | half"]
    forwarder.copy(last=True)
    assert out.endswith(b"rank-4.a1 | last\n")


def test_an_event_that_is_half_written_and_a_line_without_end(tmp_path):
    forwarder, out = made(tmp_path)
    events, log = tmp_path / "events" / "host-2-abcde.3.jsonl", tmp_path / "logs" / "rank-7.a3.log"
    line = started(7, 3)
    events.write_text(line[:20])
    log.write_bytes(b"\r" * (LONGEST_BYTES + 1))
    forwarder.add_files({events.name})
    forwarder.copy()
    assert not out
    with open(events, "a") as file:
        file.write(line[20:])
    forwarder.copy()
    assert out == b"rank-7.a3 | " + b"\r" * (LONGEST_BYTES + 1) + b"\n"


def test_who_told_a_line():
    assert writer_of("rank-3.a12 | loss | 2\n", "host-1") == ("rank-3.a12", "loss | 2\n")
    assert writer_of("prepare-host-1-abcde | x", "host-1") == ("prepare-host-1-abcde", "x")
    assert writer_of("a table | of the agent's\n", "host-1") == ("host-1", "a table | of the agent's\n")


def test_json_lines_are_what_cloud_logging_groups_and_muster_logs_reads_them(tmp_path):
    (tmp_path / "run_id").write_text("demo-1\n")
    (tmp_path / "resolved.json").write_text('{"output": {"json_logs": true}}')
    forwarder, out = made(tmp_path)
    (tmp_path / "events" / "host-2-abcde.1.jsonl").write_text(started(4, 1))
    (tmp_path / "logs" / "rank-4.a1.log").write_bytes(b'he said "\xff"\nValueError: no\n{"severity":"x"}\n')
    forwarder.add_files({"host-2-abcde.1.jsonl"})
    forwarder.copy()
    lines = out.decode().splitlines()
    first, second, third = map(json.loads, lines)
    labels = {"muster_run": "demo-1", "muster_task": "rank-4.a1", "muster_rank": "4"}
    assert first == {"severity": "INFO", "message": 'he said "\ufffd"', "logging.googleapis.com/labels": labels}
    assert (second["severity"], second["message"]) == ("ERROR", "ValueError: no")
    assert third["message"] == '{"severity":"x"}'
    assert [writer_of(line, "pod") for line in lines[:2]] == [
        ("rank-4.a1", 'he said "\ufffd"'),
        ("rank-4.a1", "ValueError: no"),
    ]


@pytest.mark.parametrize("line", ['{"severity":"INFO"', '{"severity":"INFO","message":"a program of its own"}', "{"])
def test_a_programs_own_json_is_left_as_it_is(line):
    assert writer_of(line, "pod") == ("pod", line)


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("Traceback (most recent call last):", "ERROR"), ("[rank3]: Traceback (most recent call last):", "ERROR"),
        ("error: no such file", "ERROR"), ("RuntimeError: x", "ERROR"), ("torch.OutOfMemoryError: x", "ERROR"),
        ("warning: slow", "WARNING"), ("/a/b.py:3: UserWarning: x", "WARNING"), ("W1123 10:00:00 x", "WARNING"),
        ("step 12  loss 2.3", "INFO"), ("an error: none", "INFO"), ("", "INFO"),
    ],
)  # fmt: skip
def test_severities(text, severity):
    assert severity_of(text) == severity


def test_json_is_written_where_the_run_file_asks_for_it(tmp_path):
    assert run_output.json_logs_of(tmp_path) == ""
    (tmp_path / "run_id").write_text("demo-1\n")
    for asked in (True, False):
        (tmp_path / "resolved.json").write_text(json.dumps({"output": {"json_logs": asked}}))
        assert run_output.json_logs_of(tmp_path) == ("demo-1" if asked else "")
