"""Run folders say which format they are in; another one is refused with the version that reads it."""

import pytest

from muster.core.errors import UsageError
from muster.storage import run_registry


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    return run_registry.create("a-run", tmp_path / "run", run_file="name: a\n", resolved="{}\n")


def test_a_run_of_this_format_is_found(made):
    assert (made.path / "format").read_text() == f"{run_registry.FORMAT}\n"
    assert run_registry.find(str(made.path)) == run_registry.find("a-run") == made


def test_a_folder_of_0_1_0_is_refused_with_the_commit_that_reads_it(made):
    (made.path / "format").unlink()
    with pytest.raises(UsageError, match="format 1; this version reads format 4") as refused:
        run_registry.find("a-run")
    assert "commit 77c47f8" in str(refused.value.hint)
    with pytest.raises(UsageError, match="format 1"):
        run_registry.create("a-run", made.path, run_file="name: a\n", resolved="{}\n")


def test_a_folder_of_the_future_is_refused(made):
    (made.path / "format").write_text("5\n")
    with pytest.raises(UsageError, match="format 5") as refused:
        run_registry.find(str(made.path))
    assert "newer" in str(refused.value.hint)


def test_a_folder_of_0_2_0_is_read_unless_its_home_is_in_a_bucket(made):
    (made.path / "format").write_text("3\n")
    assert run_registry.find(str(made.path)) == made
    (made.path / "home").write_text("gs://bucket/runs/a\n")
    with pytest.raises(UsageError, match="format 3; this version reads format 4") as refused:
        run_registry.find(str(made.path))
    assert "commit 331955c5" in str(refused.value.hint)
    assert run_registry.find("a-run", any_format=True) == made, "muster down ends it"
