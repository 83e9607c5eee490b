"""What a killed preparation has done is kept, verified and gone on with; the result is as if it had not been killed."""

import json

import numpy as np
import pytest

from muster.data import build, tokenise
from muster.data.chat.engine import ChatReport
from muster.data.prepare import prepare
from muster.data.spool import Spool
from muster.data.tokenise import Tokens


def tokens(first, *lengths):
    count = sum(lengths)
    return Tokens(
        ids=np.arange(first, first + count, dtype=np.int32), supervised=np.ones(count, dtype=np.uint8),
        lengths=np.array(lengths, dtype=np.int64), documents=np.array([len(lengths), 0], dtype=np.int64), unknown=1,
        report=ChatReport(empty=1),
    )  # fmt: skip


def written(folder):
    spool = Spool(folder)
    for part, chunk in (("0", tokens(0, 3, 4)), ("0", tokens(7, 5)), ("0-heldout", tokens(12, 2))):
        spool.add(part, chunk)
    spool.close()


def taken(folder, part="0"):
    spool = Spool(folder)
    found = [(chunk.ids.tolist(), chunk.lengths.tolist()) for chunk in spool.resume(part)]
    spool.close()
    return found


WHOLE = [(list(range(7)), [3, 4]), (list(range(7, 12)), [5])]


def test_chunks_are_taken_up_part_by_part(tmp_path):
    written(tmp_path)
    spool = Spool(tmp_path)
    assert [chunk.ids.tolist() for chunk in spool.resume("0")] == [ids for ids, _ in WHOLE]
    assert list(spool.resume("1")) == []
    assert [chunk.lengths.tolist() for chunk in spool.resume("0-heldout")] == [[2]]
    assert spool.tokens == 14 and spool.unknown == 3 and spool.arrays()[0].tolist() == list(range(14))


def test_what_is_not_taken_up_goes_with_the_next_chunk(tmp_path):
    written(tmp_path)
    spool = Spool(tmp_path)
    next(spool.resume("0"))
    spool.add("0", tokens(100, 1))
    assert spool.arrays()[0].tolist() == [*range(7), 100]
    spool.close()
    assert taken(tmp_path) == [WHOLE[0], ([100], [1])]


@pytest.mark.parametrize("name", ["spool.ids", "spool.mask", "spool.lengths", "spool.documents", "chunks.jsonl"])
@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_damaged_chunk_and_all_after_it_are_done_again(tmp_path, name, how):
    written(tmp_path)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    # In the second of the three chunks.
    at = {
        "spool.ids": 4 * 9,
        "spool.mask": 9,
        "spool.lengths": 8 * 2,
        "spool.documents": 8 * 2,
        "chunks.jsonl": len(data) // 2,
    }[name]
    if how == "cut":
        del data[at:]
    else:
        data[at] ^= 2
    path.write_bytes(data)
    assert taken(tmp_path) == WHOLE[:1]
    spool = Spool(tmp_path)
    assert len(list(spool.resume("0"))) == 1
    spool.add("0", tokens(7, 5))
    spool.close()
    assert taken(tmp_path) == WHOLE


@pytest.fixture
def rows(tmp_path):
    with open(tmp_path / "a.jsonl", "w") as file:
        file.writelines(json.dumps({"text": f"word {number} of some"}) + "\n" for number in range(100))
    return {"type": "file", "path": str(tmp_path / "a.jsonl")}


def test_an_interrupted_preparation_goes_on_where_it_was(rows, make_spec, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenise, "CHUNK_ROWS", 10)
    done = []
    real = tokenise.tokenise_rows

    def interrupted(chunk, *args, first_row=0):
        if first_row == 60 and 60 not in done:
            done.append(60)
            raise KeyboardInterrupt
        done.append(first_row)
        return real(chunk, *args, first_row=first_row)

    monkeypatch.setattr(tokenise, "tokenise_rows", interrupted)
    spec = make_spec([rows])
    trained = []
    train = build.training_texts
    monkeypatch.setattr(build, "training_texts", lambda *given: trained.append(1) or train(*given))
    with pytest.raises(KeyboardInterrupt):
        prepare(spec, run_dir=tmp_path / "run")
    assert [path.name[:6] for path in (tmp_path / "cache").iterdir()] == [".work-"]
    resumed = prepare(spec, run_dir=tmp_path / "run")
    assert done == [*range(0, 60, 10), 60, *range(60, 100, 10)] and len(trained) == 1
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {resumed.fingerprint, resumed.folder.name}
    fresh = prepare(make_spec([rows], cache_dir=str(tmp_path / "other")), run_dir=tmp_path / "run-b")
    assert len(contents(fresh.folder)) > 10 and contents(resumed.folder) == contents(fresh.folder)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_row_that_does_not_fit_leaves_nothing(rows, make_spec, tmp_path):
    with open(rows["path"], "a") as file:
        file.write('{"text": 5}\n')
    with pytest.raises(build.UsageError, match=r"a\.jsonl:101"):
        prepare(make_spec([rows]), run_dir=tmp_path / "run")
    assert list((tmp_path / "cache").iterdir()) == []


def test_chunks_end_by_characters_too():
    many = [{"messages": [{"role": "user", "content": "x" * 300_000}]} for _ in range(10)]
    assert [(start, len(chunk)) for start, chunk in tokenise._chunks(many, 5)] == [(5, 4), (9, 4), (13, 2)]
