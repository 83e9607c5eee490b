"""Records, their signatures by the real ssh-keygen, and the page that collects them."""

import dataclasses
import json
import shutil
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from muster.accept import record
from muster.accept.ladder import Climbed
from muster.config.load import loads
from muster.core.clock import SystemShell
from muster.core.errors import UsageError
from tools import verified_page as page

DOCS = Path(__file__).parents[3] / "docs"
SHELL = SystemShell()
SPEC = loads("{name: x, backend: slurm, command: [train], resources: {locations: [rack-1]}}", environment=False).spec
FINE = Climbed(name="train", title="two hosts train", outcome="passed", said="step 5", seconds=3.0, spent=1.25)
needs_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")


def test_the_page_holds_what_its_records_say():
    text = (DOCS / page.PAGE).read_text()
    assert text == page.written(text, page.table(DOCS / page.FOLDER, SHELL)), "python tools/verified_page.py docs"


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    SHELL.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)])
    folder = tmp_path / "verified"
    folder.mkdir()
    kind, blob = path.with_suffix(".pub").read_text().split()[:2]
    (folder / page.SIGNERS).write_text(f"ada@example.com {kind} {blob}\n")
    return path


def put(key, name="one", *, rungs=(FINE,), rehearsal=None, change=None):
    """A record among the others, signed."""
    began = datetime(2026, 8, 22, tzinfo=UTC)
    found = record.record(SPEC, rungs, budget=50, began=began, rehearsal=rehearsal)
    written = record.write(key.parent / name, found)
    signature = record.sign(written, key, found, SHELL)
    folder = key.parent / "verified"
    text = written.read_text()
    (folder / f"{name}.json").write_text(change(text) if change else text)
    shutil.copy(signature, folder / f"{name}.json.sig")
    return folder


@needs_ssh
def test_a_signed_record_enters(key):
    folder = put(key)
    (row,) = page.table(folder, SHELL).splitlines()[2:]
    assert row.startswith("| slurm rack-1 | none named | 1 of 1 | $1.25 |") and row.endswith("| ada@example.com |")
    text = (folder / "one.json").read_text()
    assert "project" not in json.loads(text)


@needs_ssh
def test_a_rehearsal_never_enters_the_page(key):
    folder = put(key, rehearsal="services in memory")
    with pytest.raises(UsageError, match="does not hold for an acceptance"):
        page.table(folder, SHELL)

    def denied(text):
        return text.replace('"rehearsal": "services in memory"', '"rehearsal": null')

    folder = put(key, rehearsal="services in memory", change=denied)
    with pytest.raises(UsageError, match="does not hold"):
        page.table(folder, SHELL)
    # Not even one that somebody signed as an acceptance by hand.
    copy = folder / "one.json"
    copy.write_text(json.dumps({**json.loads(copy.read_text()), "rehearsal": "services in memory"}))
    (folder / "one.json.sig").unlink()
    assert (
        SHELL.run(["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", record.ACCEPTANCE, str(copy)]).returncode
        == 0
    )
    with pytest.raises(UsageError, match="is a rehearsal against services in memory"):
        page.table(folder, SHELL)


@needs_ssh
def test_what_failed_what_was_changed_and_what_strangers_sign_stay_out(key, tmp_path):
    failed = dataclasses.replace(FINE, outcome="failed", said="no room")
    with pytest.raises(UsageError, match="was not accepted"):
        page.table(put(key, rungs=(failed,)), SHELL)
    with pytest.raises(UsageError, match="does not hold"):
        page.table(put(key, change=lambda text: text.replace("1.25", "0.25")), SHELL)
    folder = put(key)
    (folder / page.SIGNERS).write_text("")
    with pytest.raises(UsageError, match="does not hold"):
        page.table(folder, SHELL)
    (folder / "one.json.sig").unlink()
    with pytest.raises(UsageError, match="has no signature"):
        page.table(folder, SHELL)


@needs_ssh
def test_a_key_that_cannot_sign_is_said(tmp_path):
    found = record.record(SPEC, [FINE], budget=1, began=datetime.now(UTC), rehearsal=None)
    with pytest.raises(UsageError, match="does not sign"):
        record.sign(record.write(tmp_path, found), tmp_path / "nothing", found, SHELL)


def test_evidence_holds_no_secret(tmp_path):
    said = "refused with hf_abcdefghijklmnopqrstuvwx"
    found = record.record(
        SPEC, [dataclasses.replace(FINE, outcome="failed", said=said)], budget=1, began=datetime.now(UTC),
        rehearsal=None,
    )  # fmt: skip
    record.write(tmp_path, found)
    with tarfile.open(record.pack(tmp_path, None)) as archive:
        text = archive.extractfile(record.RECORD).read().decode()
    assert "refused with ***" in text and "hf_abc" not in text
    assert json.loads(text)["accepted"] is False
