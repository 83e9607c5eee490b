"""The resolved run file of a run's folder: whatever one place of it is changed to, who reads it is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from muster.config import load
from muster.config.spec import RunSpec
from muster.core import resolved_file
from muster.core.resolved_file import DAMAGED, NAME, DamagedRunFile

SPEC = load.loads(
    "{name: x, model: {config: {model_type: llama}}, data: {sources: [{type: random}]}, training: {steps: 5}}",
    environment=False,
).spec
TEXT = SPEC.model_dump_json(indent=1) + "\n"


def test_what_is_written_is_read_and_is_json_for_everybody_else(tmp_path: Path):
    resolved_file.write(tmp_path, TEXT)
    assert resolved_file.read(tmp_path) == TEXT
    found = json.loads((tmp_path / NAME).read_text())
    assert found.pop("checksum") == f"sha256:{resolved_file.digest(TEXT)}" and found == json.loads(TEXT)
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_sealing_it_twice_changes_nothing_and_compact_text_is_taken(tmp_path: Path):
    once = resolved_file.sealed(TEXT)
    assert resolved_file.sealed(once) == once
    resolved_file.write(tmp_path, SPEC.model_dump_json())
    assert RunSpec.model_validate_json(resolved_file.read(tmp_path)) == SPEC


@pytest.mark.parametrize("bit", [0, 2, 6])
def test_a_flipped_bit_anywhere_is_noticed(bit: int):
    data = resolved_file.sealed(TEXT).encode()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << bit
        with pytest.raises(DamagedRunFile):
            resolved_file.unsealed(bytes(changed))


@pytest.mark.parametrize("length", [0, 1, 40, 95, 200, -2])
def test_so_is_a_part_of_it(length: int):
    with pytest.raises(DamagedRunFile):
        resolved_file.unsealed(resolved_file.sealed(TEXT).encode()[:length])


def test_one_without_a_checksum_is_taken_as_it_is(tmp_path: Path):
    """Of an earlier version."""
    (tmp_path / NAME).write_text(TEXT)
    assert resolved_file.read(tmp_path) == TEXT


def test_the_error_names_the_file_in_one_line(tmp_path: Path):
    resolved_file.write(tmp_path, TEXT)
    (tmp_path / NAME).write_text((tmp_path / NAME).read_text().replace('"steps": 5', '"steps": 7'))
    with pytest.raises(DamagedRunFile, match=f"{tmp_path}/{NAME} is damaged: it does not fit its checksum") as caught:
        resolved_file.read(tmp_path)
    assert "\n" not in str(caught.value) and "muster recover" in str(caught.value.hint)


def test_who_is_patient_gets_what_is_written_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / NAME).write_bytes(b"{")
    monkeypatch.setattr("time.sleep", lambda seconds: resolved_file.write(tmp_path, TEXT))
    with pytest.raises(DamagedRunFile):
        resolved_file.read(tmp_path)
    assert resolved_file.read(tmp_path, patient=True) == TEXT
    (tmp_path / NAME).write_bytes(b"{")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(resolved_file, "PATIENCE_S", 0.01)
    with pytest.raises(DamagedRunFile):
        resolved_file.read(tmp_path, patient=True)


def test_one_that_is_gone_is_waited_for_in_a_run_s_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []

    def written_meanwhile(seconds: float) -> None:
        waits.append(seconds)
        resolved_file.write(tmp_path, TEXT)

    monkeypatch.setattr("time.sleep", written_meanwhile)
    (tmp_path / "notes.txt").write_text("a folder, and no run")
    with pytest.raises(FileNotFoundError):
        resolved_file.read(tmp_path, patient=True)
    (tmp_path / "job.json").write_text("{}")
    assert not waits and resolved_file.read(tmp_path, patient=True) == TEXT and len(waits) == 1


@pytest.mark.parametrize("there", [True, False])
def test_a_run_whose_disk_is_away_is_waited_for(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A mount point without its disk is an empty folder, and may be none."""
    folder = tmp_path / "run"
    if there:
        folder.mkdir()

    def back(seconds: float) -> None:
        folder.mkdir(exist_ok=True)
        resolved_file.write(folder, TEXT)

    monkeypatch.setattr("time.sleep", back)
    assert resolved_file.read(folder, patient=True) == TEXT
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        resolved_file.read(folder)


def test_a_damaged_one_is_kept_where_it_is_and_beside_it(tmp_path: Path):
    resolved_file.set_aside(tmp_path)
    (tmp_path / NAME).write_bytes(b"\xff{")
    resolved_file.set_aside(tmp_path)
    assert (tmp_path / DAMAGED).read_bytes() == (tmp_path / NAME).read_bytes() == b"\xff{"


def test_it_is_a_run_file_for_another_run_too(tmp_path: Path):
    resolved_file.write(tmp_path, TEXT)
    assert load.load(tmp_path / NAME, environment=False).spec.name == "x"
