"""How far a machine's start has come, and why it is late."""

import pytest

from muster.backends.gce.reason import LIMITS_S, read_report, sentence, tree

ASKED_S = 1_000_000.0


def at(now_s, told=None, *, created_s=None, joined=False):
    told = {stage: (ASKED_S + after_s, words) for stage, (after_s, words) in (told or {}).items()}
    created_s = None if created_s is None else ASKED_S + created_s
    rows = tree(created_s, told, asked_s=ASKED_S, joined=joined, now_s=ASKED_S + now_s)
    return [row.state for row in rows], sentence(rows, ASKED_S + now_s)


DONE = {
    "booted": (40, "as host"), "driver": (90, "8 GPUs"), "bundle": (200, "Python 3.12"), "started": (201, "unit"),
    "checked": (204, "the files"),
}  # fmt: skip


def upto(stage):
    return dict(list(DONE.items())[: list(DONE).index(stage) + 1])


def test_from_the_request_to_the_join():
    assert at(10) == (["waiting", *"-----"], "created for 10 s (limit 600 s)")
    assert at(50, created_s=30) == (["done", "waiting", *"----"], "booted for 20 s (limit 300 s)")
    states, words = at(100, upto("booted"), created_s=30)
    assert states == ["done", "done", "waiting", "-", "-", "-"] and words == "driver for 60 s (limit 960 s)"
    assert at(150, upto("bundle"), created_s=30)[0] == ["done", "done", "done", "waiting", "-", "-"]
    assert at(205, DONE, created_s=30) == (["done"] * 5 + ["waiting"], "joined for 1 s (limit 180 s)")
    assert at(205, DONE, created_s=30, joined=True) == (["done"] * 6, "joined")


@pytest.mark.parametrize(
    ("told", "created_s", "began_s", "stage", "reason"),
    [
        ({}, None, 0, "created", "the request"),
        ({}, 30, 30, "booted", "Private Google Access"),
        (upto("booted"), 30, 40, "driver", "nvidia-smi"),
        (upto("driver"), 30, 90, "agent", "bundle"),
        (upto("started"), 30, 201, "checked", "journal"),
        (DONE, 30, 204, "joined", "firewall rule"),
    ],
)
def test_each_stage_is_late_after_its_own_limit_with_its_own_reason(told, created_s, began_s, stage, reason):
    limit_s = LIMITS_S[stage]
    assert "late" not in at(began_s + limit_s, told, created_s=created_s)[1]
    states, words = at(began_s + limit_s + 1, told, created_s=created_s)
    assert states[list(LIMITS_S).index(stage)] == "late"
    assert words.startswith(f"{stage} is late ({limit_s + 1:.0f} s, limit {limit_s:.0f} s): ") and reason in words


def test_what_the_machine_says_itself_wins():
    told = upto("driver") | {"failed": (120, "gs://b/x is not what its name says")}
    states, words = at(5000, told, created_s=30)
    assert states == ["done", "done", "done", "failed", "-", "-"]
    assert words == "agent failed: gs://b/x is not what its name says"


def test_a_later_stage_proves_the_ones_before_it():
    assert at(300, {"checked": DONE["checked"]})[0] == ["done"] * 5 + ["waiting"]


def test_lines_of_others_are_no_news():
    assert read_report("1700000000 8 GPUs\n") == (1_700_000_000.0, "8 GPUs")
    assert read_report("what is this") == (0.0, "is this")
    assert read_report("") == (0.0, "")
    assert read_report("\u00b2 a digit to Unicode, and no number") == (0.0, "a digit to Unicode, and no number")
