"""Folders that somebody sent (``tools/hostile.py``): no reading verb hangs, takes all memory or passes on an escape."""

import pytest
from thorough import THOROUGH

from tools import hostile

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), pytest.mark.reads("tools/hostile.py")]

#: One verb for each reader: summary, events with their text, account, captures, output, stores.
VERBS = tuple(hostile.VERBS) if THOROUGH else ("status", "events", "report", "why --from", "logs", "checkpoints")
#: Reading takes longer than the limit on a busy machine: by hand, and every night.
LONG = ("many-incidents", "long-line")


def test_no_verb_is_hurt_by_a_folder_that_was_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", "/nowhere")  # the tool names one for each kind
    hostile.import_verbs()
    kinds = [kind for kind in hostile.kinds("") if THOROUGH or kind not in LONG]
    found = [problem for kind in kinds for problem in hostile.tried(tmp_path, kind, VERBS)]
    assert len(kinds) >= 40 and not found, "\n".join(str(problem)[:500] for problem in found)


def test_the_tool_sees_what_misbehaves():
    assert len(list(hostile.problems_of(f"{hostile.TEXTS['escapes']} {hostile.SECRET} Traceback"))) == 3
