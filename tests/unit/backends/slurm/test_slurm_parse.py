"""What Slurm prints: the samples of a real cluster where they are at hand, and whatever else may stand in a field."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.backends.slurm import parse, reason_text

RECORDED = Path(__file__).resolve().parents[5] / "shared" / "data" / "oracles" / "slurm"
FIELDS = ("id", "name", "reason")


def recorded(name: str) -> str:
    path = RECORDED / f"sample-{name}-output.txt"
    if not path.exists():
        pytest.skip(f"no recorded {name} output at hand ({path.name})")
    return path.read_text(errors="replace")


def printed(*rows: tuple[str, ...]) -> str:
    return "".join(parse.RECORD + parse.UNIT.join(row) + "\n" for row in rows)


def test_records_are_read_back():
    text = printed(("12", "muster-a.1", "Resources"), ("13", "x", "None"))
    assert list(parse.records(text, FIELDS)) == [
        {"id": "12", "name": "muster-a.1", "reason": "Resources"},
        {"id": "13", "name": "x", "reason": "None"},
    ]


def test_line_breaks_bars_and_broken_utf8_stay_inside_their_field():
    name = b"two\nlines | and \xff\xfe a bar\r\n  x".decode(errors="replace")
    (row,) = parse.records(printed(("12", name, "(None)")), FIELDS)
    assert row["name"] == name and row["id"] == "12"


@pytest.mark.parametrize(
    "text",
    ["", "\n", "slurm_load_jobs error: Unable to contact slurm controller\n", "12|muster|None\n", parse.RECORD,
     parse.RECORD * 3 + parse.UNIT, parse.RECORD + "12" + parse.UNIT + "only two"],
)  # fmt: skip
def test_what_is_no_record_of_ours_is_left_out(text):
    assert list(parse.records(text, FIELDS)) == []


@given(st.text(), st.sampled_from([FIELDS, ("one",)]))
def test_no_text_raises(text, fields):
    list(parse.records(text, fields))
    list(parse.pairs(text))
    parse.accounting(text)
    parse.gpus(text)
    for read in (parse.job_id, parse.node_usable, reason_text.waits):
        read(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:h100:8(S:0-1)", [("h100", 8)]), ("gpu:8", [("", 8)]), ("gpu:gen:2(S:0-1)", [("gen", 2)]),
        ("gpu:a100:4,gpu:h100:4(S:0,1),nvme:1", [("a100", 4), ("h100", 4)]), ("(null)", []), ("N/A", []), ("", []),
        ("gpu:nvidia_h100_80gb_hbm3:8", [("nvidia_h100_80gb_hbm3", 8)]), ("gpu:h100:8(IDX:0-7)", [("h100", 8)]),
        ("gpu:2K", [("", 2048)]), ("gpus:8", []), ("gpu:h100", []), ("shard:64,gpu:1", [("", 1)]),
        ("gpu:h100:no_consume:8", [("h100", 8)]), ("gpu:no_consume:8", [("", 8)]), ("gpu:no_consume", []),
        ("gres/gpu:h100:8", [("h100", 8)]), ("gres/gpu:h100=8", [("h100", 8)]), ("gres/gpu=8", [("", 8)]),
        ("cpu=208,mem=1900000M,gres/gpu=8,gres/gpu:h100=8", [("h100", 8)]), ("gres/gpumem:h100=8", []),
    ],
)  # fmt: skip
def test_gpus(text, found):
    assert [(gpus.type, gpus.count) for gpus in parse.gpus(text)] == found


@pytest.mark.parametrize(
    ("text", "usable"),
    [("idle", True), ("alloc", True), ("mixed-", True), ("idle~", True), ("idle*", False), ("drain*", False),
     ("drained", False), ("down*", False), ("maint", False), ("planned", True), ("idle$", False), ("", False)],
)  # fmt: skip
def test_usable_nodes(text, usable):
    assert parse.node_usable(text) is usable


@pytest.mark.parametrize("text", ["reserved", "resv", "maint", "RESERVED~", "idle$", "mixed$", "planned", "idle"])
def test_nodes_of_a_reservation_are_usable_for_a_run_that_names_it(text):
    assert parse.node_usable(text, reservation=True)
    assert parse.node_usable(text) is (text in ("planned", "idle"))
    assert not parse.node_usable(text + "*", reservation=True), "a node that does not answer"


@pytest.mark.parametrize("text", ["down", "drained", "draining", "fail", "unknown", ""])
def test_a_reservation_makes_no_broken_node_usable(text):
    assert not parse.node_usable(text, reservation=True)


def test_job_ids():
    assert [parse.job_id(text) for text in ("12\n", "12;cluster\n", "Submitted batch job 12", "", "x")] == [
        "12", "12", "12", None, None,
    ]  # fmt: skip


def test_pairs_keep_blanks_inside_values():
    text = "JobId=7 JobName=two words here UserId=me(1) Comment=a=b JobState=RUNNING Reason=None Nodes:X=1\n\n"
    (found,) = parse.pairs(text)
    assert (found["JobId"], found["JobName"], found["JobState"]) == ("7", "two words here", "RUNNING")
    assert found["Comment"] == "a=b"


def test_an_account_row_of_another_shape_is_passed_over():
    text = "JobID|Comment|State\n1|fine|COMPLETED\n2|a\nb\nc|FAILED\n3|x|TIMEOUT\n"
    assert [row["State"] for row in parse.accounting(text)] == ["COMPLETED", "TIMEOUT"]
    assert parse.accounting("JobID|State\nno bar at all") == []


# ---------------------------------------------------------------- a real cluster's output


def test_recorded_sinfo():
    header, *lines = recorded("sinfo").splitlines()
    names = [name.strip() for name in header.split("|")]
    rows = [dict(zip(names, (value.strip() for value in line.split("|")), strict=False)) for line in lines]
    assert len(rows) >= 4
    for row in rows:
        assert parse.gpus(row["GRES"]) and parse.gpus(row["GRES"])[0].type == "gen"
    usable = {row["STATE"] for row in rows if parse.node_usable(row["STATE"])}
    assert usable == {row["STATE"] for row in rows if row["STATE"].lower() in ("allocated", "alloc")} != set()
    assert [parse.node_usable(row["STATE"]) for row in rows] == [row["STATE"].startswith("alloc") for row in rows]


def test_recorded_squeue():
    rows = [line.split("|#") for line in recorded("squeue").splitlines() if line]
    assert len(rows) >= 5
    for row in rows:
        assert parse.job_id(row[3]) == row[3]
        assert row[9] not in parse.ENDED
    waiting = {row[9]: reason_text.waits(row[27]) for row in rows if row[9] == "PENDING"}
    assert waiting and all("Slurm says" not in sentence for sentence in waiting.values()), waiting
    assert any(row[9] == "RUNNING" and parse.gpus(row[0]) for row in rows)


def test_recorded_scontrol():
    found = list(parse.pairs(recorded("scontrol")))
    assert [row["PartitionName"] for row in found] == ["partition1", "partition2", "partition3"]
    assert found[1]["MaxNodes"] == "64" and found[0]["State"] == "UP"


def test_recorded_sacct():
    rows = parse.accounting(recorded("sacct"))
    assert len(rows) > 20
    states = {row["State"].split()[0] for row in rows}
    assert states & parse.ENDED
    assert all(re.fullmatch(r"\d+:\d+", row["ExitCode"]) for row in rows), "no row is shifted"
