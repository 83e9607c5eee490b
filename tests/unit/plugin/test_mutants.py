"""Changes of the source that the tests should notice: ``tools/mutants.py``."""

from tools.mutants import changed, instrumented, is_another_program, mutants_of

SOURCE = '''"""A module."""
from __future__ import annotations

LIMIT = 3


def act(log, store, text, *, at=1):
    """What it does."""
    WAIT_S = 4
    log.info("nothing", 5)
    store.put("key", at=at)
    store.known = True
    try:
        if at < 2 and text:
            raise ValueError(f"{at + 6} is wrong")
    except ValueError:
        pass
    return (at + 1) if not text else "text" + text


def one(): return 1
'''


def test_each_operator_applies_once_and_what_is_only_said_stays():
    mutants = list(mutants_of(SOURCE, "src/muster/a.py", "room"))
    assert all(is_another_program(SOURCE, mutant) for mutant in mutants)
    shown = {(mutant.line, mutant.operator, mutant.before) for mutant in mutants}
    assert shown == {
        (11, "call dropped", 'store.put("key", at=at)'),
        (11, "keyword at dropped", 'store.put("key", at=at)'),
        (12, "assignment dropped", "store.known = True"),
        (13, "except nothing", "ValueError"),
        (14, "condition negated", "at < 2 and text"),
        (14, "and, or", "at < 2 and text"),
        (14, "comparison", "at < 2"),
        (14, "integer + 1", "2"),
        (14, "integer - 1", "2"),
        (15, "raise dropped", 'raise ValueError(f"{at + 6} is wrong")'),
        (18, "return None", 'return (at + 1) if not text else "text" + text'),
        (18, "condition negated", '(at + 1) if not text else "text" + text'),
        (18, "plus, minus", "at + 1"),
        (18, "integer + 1", "1"),
        (18, "integer - 1", "1"),
        (21, "return None", "return 1"),
        (21, "integer + 1", "1"),
        (21, "integer - 1", "1"),
    }


def test_a_mutant_differs_in_that_place_alone():
    mutant = next(each for each in mutants_of(SOURCE, "a.py", "room") if each.operator == "comparison")
    assert changed(SOURCE.encode(), mutant).decode() == SOURCE.replace("at < 2", "(at <= 2)")


def test_each_function_notes_that_it_runs():
    lines = instrumented(SOURCE, "a.py").splitlines()
    assert lines[2] == "from muster._reach import hit as _hit"
    assert '    _hit("a.py:7")' in lines and 'def one(): _hit("a.py:21"); return 1' in lines
    compile("\n".join(lines), "a.py", "exec")
