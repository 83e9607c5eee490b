"""A user's program in a rank finds the modules that plain Python would find."""

import sys
from types import SimpleNamespace

from muster.rank import user_script


def test_a_module_of_the_current_folder_is_run(tmp_path, monkeypatch):
    """As by ``python -m``, though the rank's own process was started with -P."""
    (tmp_path / "my_training.py").write_text("import sys, my_part\nsys.exit(len(sys.argv) + my_part.SEVEN)\n")
    (tmp_path / "my_part.py").write_text("SEVEN = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(user_script.muster.run, "enter", lambda context, agent: None)
    agent = SimpleNamespace(emit=lambda kind, **details: None)
    assert user_script.run_command(["-m", "my_training", "--flag"], SimpleNamespace(), agent) == 9
