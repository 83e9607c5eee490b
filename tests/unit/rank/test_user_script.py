"""A user's program in a rank finds the modules that plain Python would find."""

import sys
from types import SimpleNamespace

import pytest

from muster.core.incidents import RANK_EXCEPTION
from muster.protocol.to_supervisor import RankExit
from muster.rank import user_script
from muster.rank.standby import last_words
from muster.supervise.recovery.rank_exits import classify_rank_exit


def test_a_module_of_the_current_folder_is_run(tmp_path, monkeypatch):
    """As by ``python -m``, though the rank's own process was started with -P."""
    (tmp_path / "my_training.py").write_text("import sys, my_part\nsys.exit(len(sys.argv) + my_part.SEVEN)\n")
    (tmp_path / "my_part.py").write_text("SEVEN = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(user_script.muster.run, "enter", lambda context, agent: None)
    agent = SimpleNamespace(emit=lambda kind, **details: None)
    with pytest.raises(SystemExit) as left:
        user_script.run_command(["-m", "my_training", "--flag"], SimpleNamespace(), agent)
    assert left.value.code == 9


@pytest.mark.parametrize(
    ("ends", "message"), [('sys.exit("boom")', "boom"), ("sys.exit(3)", "the script left with exit code 3")]
)
def test_the_words_that_it_leaves_with_are_its_last_ones(tmp_path, monkeypatch, ends, message):
    script = tmp_path / "train.py"
    script.write_text(f"import sys\n{ends}\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(user_script.muster.run, "enter", lambda context, agent: None)
    agent = SimpleNamespace(emit=lambda kind, **details: None)
    try:
        user_script.run_command([str(script)], SimpleNamespace(), agent)
    except SystemExit as error:
        words = last_words(error)
    assert (words.exception, words.message) == ("SystemExit", message)
    assert f'{script}", line 2' in words.traceback
    exit_of_it = RankExit(attempt=1, rank=0, pid=1, code=1, step=None, last=words)
    kind, evidence, _ = classify_rank_exit("host-0", exit_of_it)
    assert kind is RANK_EXCEPTION and evidence == f"rank 0 on host-0: {message}"


def test_last_words_need_no_import(monkeypatch):
    """Where memory has run out, an import fails, too."""
    monkeypatch.setitem(sys.modules, "muster.train.optim.nonfinite", None)  # to import it would raise
    words = last_words(RuntimeError("can't allocate memory"))
    assert (words.message, words.not_finite) == ("can't allocate memory", False)


@pytest.mark.parametrize(("ends", "code"), [("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(75)", 75)])
def test_an_end_as_expected_has_no_words(tmp_path, monkeypatch, ends, code):
    (tmp_path / "train.py").write_text(f"import sys\n{ends}\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(user_script.muster.run, "enter", lambda context, agent: None)
    agent = SimpleNamespace(emit=lambda kind, **details: None)
    assert user_script.run_command([str(tmp_path / "train.py")], SimpleNamespace(), agent) == code
