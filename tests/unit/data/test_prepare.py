"""Preparation: what ends up in a sequence, the fate of every row, the fingerprint, and every refusal."""

import contextlib
import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from muster.config.spec import TrainedTokenizer
from muster.core.errors import AccessError, MusterError, UsageError
from muster.data import cache, sequences
from muster.data.prepare import open_prepared, prepare
from muster.data.tokenizer import Encoder, train
from muster.storage.store.link_lease import Token, here

TEXT2SQL = {"type": "text2sql", "rows": 300, "heldout_rows": 20}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"type": "file", "path": str(path)}


def documents(store):
    """(tokens with the last target, flags of supervised targets) of every document of a store."""
    found = []
    for sequence in store:
        start = 0
        for length in sequence.document_lengths:
            if start >= sequence.tokens:
                break
            ids = sequence.input_ids[start : start + length]
            labels = sequence.labels[start : start + length]
            assert (sequence.position_ids[start : start + length] == np.arange(length)).all()
            kept = labels != -100
            assert (labels[:-1][kept[:-1]] == ids[1:][kept[:-1]]).all()
            found.append(([*ids.tolist(), int(labels[-1])], kept.tolist()))
            start += length
    return found


def test_generated_rows_become_packed_sequences(make_spec, tmp_path):
    prepared = prepare(make_spec([TEXT2SQL]), run_dir=tmp_path / "run")
    stats = prepared.stats
    assert (stats["rows"], stats["documents"], stats["dropped"], stats["cached"]) == (300, 300, 0, False)
    assert stats["supervised_tokens"] + stats["context_tokens"] + stats["padding_tokens"] == len(prepared.train) * 64
    assert stats["fill"] > 0.8 and stats["unknown_tokens"] == 0
    assert prepared.heldout is not None and prepared.heldout.counts["documents"] == 20
    encoder = Encoder(prepared.tokenizer_dir)
    texts = set()
    for ids, kept in documents(prepared.train):
        assert ids[-1] == prepared.eos_id and kept[-1]
        answer = encoder.decode([token for token, flag in zip(ids[1:], kept, strict=True) if flag])
        prompt = encoder.decode([ids[0], *(token for token, flag in zip(ids[1:], kept, strict=True) if not flag)])
        assert answer.startswith(" SELECT") and prompt.startswith("table ") and prompt.endswith(" ?")
        texts.add(prompt + answer)
    assert len(texts) > 250
    for sequence in prepared.train:
        assert sequence.document_lengths.sum() == 64
        assert sequence.supervised_tokens == (sequence.labels != -100).sum()
        tail = sequence.labels[sequence.tokens :]
        assert (tail == -100).all() and (sequence.input_ids[sequence.tokens :] == prepared.pad_id).all()
    assert sum(sequence.tokens for sequence in prepared.train) == stats["tokens"] == prepared.train.tokens


def test_without_packing_each_row_has_a_sequence(make_spec, tmp_path):
    prepared = prepare(make_spec([TEXT2SQL], packing=False), run_dir=tmp_path / "run")
    assert len(prepared.train) == 300
    for sequence in prepared.train:
        assert sequence.document_lengths.tolist() == [sequence.tokens, 64 - sequence.tokens]


def test_the_second_start_finds_the_first(make_spec, tmp_path):
    spec = make_spec([TEXT2SQL])
    first = prepare(spec, run_dir=tmp_path / "a")
    second = prepare(spec, run_dir=tmp_path / "b")
    assert not first.stats["cached"] and second.stats["cached"]
    assert first.fingerprint == second.fingerprint
    assert (tmp_path / "b" / "tokenizer" / "tokenizer.json").is_file()
    found = open_prepared(spec, tmp_path / "b")
    assert (found.train[3].input_ids == first.train[3].input_ids).all()
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {first.fingerprint, first.folder.name}
    assert (tmp_path / "cache" / first.fingerprint).resolve() == first.folder


def test_hosts_whose_process_numbers_are_equal_share_a_run_folder(make_spec, tmp_path):
    """As pods do: with names made of process numbers, one replaced what another was about to rename."""
    spec = make_spec([TEXT2SQL])
    run_dir = tmp_path / "run"
    prepare(spec, run_dir=run_dir)
    with ThreadPoolExecutor(8) as hosts:
        for each in [hosts.submit(prepare, spec, run_dir=run_dir) for _ in range(100)]:
            each.result()
    left = {path.name for path in run_dir.iterdir()}
    assert left == {"data.json", "tokenizer"}, left


def test_the_fingerprint_covers_what_changes_the_tokens(make_spec, tmp_path):
    def mark(sources=(TEXT2SQL,), training=None, model=None, **data):
        return prepare(
            make_spec(list(sources), training=training, model=model, **data), run_dir=tmp_path / "r"
        ).fingerprint

    base = mark()
    assert mark() == base
    small = {"config": {"vocab_size": 512}, "tokenizer": {"vocab_size": 300}}
    others = [
        mark([{**TEXT2SQL, "seed": 1}]),
        mark([{**TEXT2SQL, "rows": 301}]),
        mark(training={"sequence_length": 72}),
        mark(packing=False),
        mark(on_overlong="truncate"),
        mark(train_on="all"),
        mark(model=small),
    ]
    assert len({base, *others}) == 1 + len(others)
    # What does not change the tokens does not prepare them again.
    assert mark(training={"seed": 5, "global_batch_size": 3}) == base
    assert mark(workers=2) == base


def test_file_content_is_what_counts(make_spec, tmp_path):
    rows = [{"text": f"some words {number}"} for number in range(30)]
    spec = make_spec([jsonl(tmp_path / "a.jsonl", rows)])
    first = prepare(spec, run_dir=tmp_path / "r")
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert prepare(spec, run_dir=tmp_path / "r").fingerprint == first.fingerprint
    jsonl(tmp_path / "a.jsonl", rows[:-1])
    assert prepare(spec, run_dir=tmp_path / "r").fingerprint != first.fingerprint


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_rows_too_long_by_each_rule(make_spec, tmp_path, overlong):
    rows = [{"text": "a b c d"}, {"text": " ".join("xyz"[number % 3] for number in range(200))}, {"text": "b a c"}]
    source = jsonl(tmp_path / "a.jsonl", rows)
    prepared = prepare(make_spec([source], on_overlong=overlong, heldout_fraction=0.0), run_dir=tmp_path / "r")
    stats = prepared.stats
    encoder = Encoder(prepared.tokenizer_dir)
    found = documents(prepared.train)
    # 200 words and the end: 200 predictions.
    counts = {"drop": (1, 0, 0, 7), "truncate": (0, 1, 0, 7 + 64), "split": (0, 0, 1, 7 + 200)}[overlong]
    assert (stats["dropped"], stats["truncated"], stats["split"], stats["tokens"]) == counts
    assert len(found) == {"drop": 2, "truncate": 3, "split": 6}[overlong]
    if overlong == "split":
        parts = {len(ids): ids for ids, _ in found if len(ids) > 6}
        assert set(parts) == {65, 200 - 3 * 64 + 1}
        targets = sorted(encoder.decode(ids[1:], skip_special=True).count("x") for ids, _ in found)
        assert sum(targets) == 66  # 67 of 200 words are x, and the first one is nobody's target


def test_a_single_text_is_split_and_its_end_held_out(make_spec, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(str(number % 50) for number in range(3000)))
    source = {"type": "file", "path": str(tmp_path / "a.txt")}
    prepared = prepare(make_spec([source], on_overlong="split", heldout_fraction=0.1), run_dir=tmp_path / "r")
    assert (prepared.train.counts["documents"], prepared.heldout.counts["documents"]) == (43, 4)
    with pytest.raises(
        UsageError, match=r"all 1 rows of data source .* are longer than training\.sequence_length 64"
    ) as caught:
        prepare(make_spec([source]), run_dir=tmp_path / "r2")
    assert "split" in caught.value.hint


def test_held_out_rows_do_not_train(make_spec, tmp_path):
    rows = [{"text": f"w{number}"} for number in range(100)]
    model = {"config": {"vocab_size": 200}, "tokenizer": {"vocab_size": 200}}
    spec = make_spec([jsonl(tmp_path / "a.jsonl", rows)], model=model, heldout_fraction=0.2)
    prepared = prepare(spec, run_dir=tmp_path / "r")
    first = {ids[0] for ids, _ in documents(prepared.train)}
    second = {ids[0] for ids, _ in documents(prepared.heldout)}
    assert (len(first), len(second), len(first & second)) == (80, 20, 0)


def test_mixtures_follow_their_weights(make_spec, tmp_path):
    many = {**jsonl(tmp_path / "a.jsonl", [{"text": "a a"}] * 90), "weight": 3.0}
    few = {**jsonl(tmp_path / "b.jsonl", [{"text": "b b"}] * 20), "weight": 1.0}
    prepared = prepare(make_spec([many, few], heldout_fraction=0.0), run_dir=tmp_path / "r")
    used = [source["documents_used"] for source in prepared.stats["sources"]]
    assert used == [90, 30]
    texts = [Encoder(prepared.tokenizer_dir).decode(ids) for ids, _ in documents(prepared.train)]
    assert (texts.count("a a"), texts.count("b b")) == (90, 30)
    # Mixed, not one after the other: no sequence of several documents holds a single kind only by order.
    assert any("a a" in text for text in texts[:10]) and any("b b" in text for text in texts[:20])


def test_random_tokens_need_no_tokenizer(make_spec, tmp_path):
    model = {"config": {"vocab_size": 100}}
    prepared = prepare(make_spec([{"type": "random", "rows": 50}], model=model), run_dir=tmp_path / "r")
    assert prepared.tokenizer_dir is None and prepared.eos_id is None and prepared.vocab_size == 100
    assert len(prepared.train) == 49 and prepared.train[0].supervised_tokens == 64
    tokens = np.concatenate([sequence.input_ids for sequence in prepared.train])
    assert tokens.min() >= 0 and tokens.max() < 100 and len(np.unique(tokens)) == 100
    again = prepare(make_spec([{"type": "random", "rows": 50, "seed": 1}], model=model), run_dir=tmp_path / "r2")
    assert (again.train[0].input_ids != prepared.train[0].input_ids).any()
    short = make_spec([{"type": "random", "rows": 10, "row_length": 16}], model=model, heldout_fraction=0.0)
    assert prepare(short, run_dir=tmp_path / "r3").train[0].document_lengths.tolist() == [16] * 4


def chat_folder(folder, template):
    train(lambda: ["user assistant : hi hello \n <|end|>"], TrainedTokenizer(vocab_size=100), folder)
    (folder / "chat_template.jinja").write_text(template)
    return {"config": {"vocab_size": 100}, "tokenizer": str(folder)}


CHATML = (
    "{% for m in messages %}{{ ' ' + m.role }} : {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %} assistant :{% endif %}"
)


def test_chat_through_a_template_without_generation_marks(make_spec, tmp_path):
    pytest.importorskip("transformers")
    model = chat_folder(tmp_path / "tok", CHATML)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    source = jsonl(tmp_path / "a.jsonl", [{"messages": turns * 2}] * 3)
    prepared = prepare(make_spec([source], model=model, heldout_fraction=0.0), run_dir=tmp_path / "r")
    encoder = Encoder(prepared.tokenizer_dir)
    for ids, kept in documents(prepared.train):
        answer = encoder.decode([token for token, flag in zip(ids[1:], kept, strict=True) if flag], skip_special=False)
        assert answer.replace("\n", "") == " hello<|end|></s>", "<|end|> is text here and ends nothing"
    with pytest.raises(UsageError, match=r"every label of data source .* is masked: .* its 3 rows"):
        prepare(make_spec([source], model=model, train_on=["critic"]), run_dir=tmp_path / "r2")


def test_a_template_that_refuses_is_an_error_with_the_row(make_spec, tmp_path):
    pytest.importorskip("transformers")
    model = chat_folder(tmp_path / "tok", "{{ raise_exception('roles must alternate') }}")
    source = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(UsageError, match=r"a\.jsonl:1: the chat template refuses a conversation: roles must alternate"):
        prepare(make_spec([source], model=model), run_dir=tmp_path / "r")


def test_rows_without_an_answer_are_left_out_and_counted(make_spec, tmp_path):
    """Learned from, they would teach to say nothing."""
    rows = [{"prompt": "a", "completion": " b"}] * 6 + [{"prompt": "a", "completion": each} for each in ("", " \n")]
    source = jsonl(tmp_path / "a.jsonl", rows)
    stats = prepare(make_spec([source], heldout_fraction=0.0), run_dir=tmp_path / "r").stats
    assert (stats["rows"], stats["documents"], stats["empty_completions"], stats["empty"]) == (8, 6, 2, 0)
    assert stats["sources"][0]["empty_completions"] == 2
    # Where all text is learned from, there is something in them.
    stats = prepare(make_spec([source], heldout_fraction=0.0, train_on="all"), run_dir=tmp_path / "r2").stats
    assert (stats["documents"], stats["empty_completions"]) == (8, 0)


def test_conversations_without_an_answer_are_left_out_and_counted(make_spec, tmp_path):
    pytest.importorskip("transformers")
    model = chat_folder(tmp_path / "tok", CHATML)
    asked = {"role": "user", "content": "hi"}
    says = [{"content": "hello"}, {"content": ""}, {"content": "\n"}, {"content": "", "tool_calls": [{"name": "f"}]}]
    rows = [{"messages": [asked, {"role": "assistant", **each}]} for each in says]
    prepared = prepare(
        make_spec([jsonl(tmp_path / "a.jsonl", rows)], model=model, heldout_fraction=0.0), run_dir=tmp_path / "r"
    )
    assert (prepared.stats["documents"], prepared.stats["empty_completions"]) == (1, 2)
    assert "1: the chat template does not write calls of tools; first: " in prepared.stats["rows_refused_why"]


REFUSED = {
    "no rows": ([], {}, "has no rows"),
    "empty texts": ([{"text": ""}] * 2, {"heldout_fraction": 0.0}, "all 2 rows of data source .* are empty"),
    "roles without chat": ([{"text": "a b"}], {"train_on": ["user"]}, "chat roles"),
    "no known columns": ([{"a": 1}], {}, r"a\.jsonl:1: no known format"),
    "a column that a later row lacks": (
        [{"prompt": "a", "completion": "b"}, {"prompt": "a"}],
        {},
        r"a\.jsonl:2: column 'completion' is missing; there are 'prompt'",
    ),
    "only empty answers": (
        [{"prompt": "a", "completion": " "}] * 2,
        {"heldout_fraction": 0.0},
        "2 of the 2 rows of data source .* have an empty answer",
    ),
    "a later row of another kind": (
        [{"text": "a"}] * 3 + [{"text": 5}],
        {},
        r"a\.jsonl:4: column 'text' must be text, got int",
    ),
    "split of prompts": ([{"prompt": "a", "completion": "b"}], {"on_overlong": "split"}, "split is for plain text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_data_is_refused_and_nothing_stays(make_spec, tmp_path, name):
    rows, data, message = REFUSED[name]
    bpe = {"config": {"vocab_size": 300}, "tokenizer": str(tmp_path / "tok")}
    train(lambda: ["a b"], TrainedTokenizer(kind="bpe", vocab_size=300), tmp_path / "tok")
    with pytest.raises(UsageError, match=message) as caught:
        prepare(make_spec([jsonl(tmp_path / "a.jsonl", rows)], model=bpe, **data), run_dir=tmp_path / "r")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())
    assert not (tmp_path / "r").exists()


def test_a_vocabulary_the_model_lacks_is_refused(make_spec, tmp_path):
    model = {"config": {"vocab_size": 80}, "tokenizer": {"vocab_size": 200}}
    with pytest.raises(UsageError, match=r"vocabulary mismatch: the tokenizer has 200 tokens, the model's config 80"):
        prepare(make_spec([TEXT2SQL], model=model), run_dir=tmp_path / "r")
    assert not list((tmp_path / "cache").iterdir())


def test_models_without_a_tokenizer_are_refused(make_spec, tmp_path):
    with pytest.raises(UsageError, match="no tokenizer"):
        prepare(make_spec([TEXT2SQL], model={"config": {"vocab_size": 80}}), run_dir=tmp_path / "r")
    with pytest.raises(UsageError, match="vocabulary size"):
        prepare(make_spec([{"type": "random"}], model={"config": {}}), run_dir=tmp_path / "r")


def test_a_cache_that_cannot_be_made_is_named(make_spec, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(AccessError, match="is not a folder") as caught:
        prepare(make_spec([TEXT2SQL]), run_dir=tmp_path / "r")
    assert "cache_dir" in caught.value.hint


def test_a_full_disk_leaves_nothing(make_spec, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sequences.np.lib.format, "write_array_header_1_0", full)
    with pytest.raises(MusterError, match="no space left for prepared data"):
        prepare(make_spec([TEXT2SQL]), run_dir=tmp_path / "r")
    assert not list((tmp_path / "cache").iterdir())


def test_damaged_data_is_named(make_spec, tmp_path):
    spec = make_spec([TEXT2SQL])
    prepared = prepare(spec, run_dir=tmp_path / "r")
    (prepared.folder / "train" / "labels.npy").write_bytes(b"")
    with pytest.raises(MusterError, match="is damaged"):
        open_prepared(spec, tmp_path / "r")
    with pytest.raises(MusterError, match="no data was prepared"):
        open_prepared(spec, tmp_path / "other")


@pytest.mark.parametrize("name", ["input_ids", "labels", "document_lengths", "document_offsets", "tokens", "checksums"])
def test_a_flipped_bit_in_a_sequence_is_never_trained_on_and_prepared_again(make_spec, tmp_path, name):
    """Wherever it is in the array's numbers or its description; the others, whose data was whole, are not disturbed."""
    spec = make_spec([{"type": "random", "rows": 40}], model={"config": {"vocab_size": 512}})
    prepared = prepare(spec, run_dir=tmp_path / "r")
    before = [(row.input_ids.tolist(), row.labels.tolist(), row.document_lengths.tolist()) for row in prepared.train]
    size = (prepared.folder / "train" / f"{name}.npy").stat().st_size
    for at in range(3, size, max(1, size // 15)):
        path = prepare(spec, run_dir=tmp_path / "r").folder / "train" / f"{name}.npy"
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << at % 8
        with open(path, "r+b") as file:
            file.write(data)
        found = told = None
        try:
            found = open_prepared(spec, tmp_path / "r").train
            found = [(row.input_ids.tolist(), row.labels.tolist(), row.document_lengths.tolist()) for row in found]
        except MusterError as error:
            told = str(error)
        assert found == before if told is None else "is damaged" in told, (at, told)
        if told is not None:
            assert not prepared.folder.exists(), at
            again = prepare(spec, run_dir=tmp_path / "r")
            assert not again.stats["cached"] and not [*(tmp_path / "cache").glob(".*")]


def test_a_damaged_sequence_is_reported_by_every_reader_and_only_the_damaged_data_is_removed(make_spec, tmp_path):
    spec = make_spec([{"type": "random", "rows": 40}], model={"config": {"vocab_size": 512}})
    prepared = prepare(spec, run_dir=tmp_path / "r")
    early, late = open_prepared(spec, tmp_path / "r").train, open_prepared(spec, tmp_path / "r").train
    with open(prepared.folder / "train" / "input_ids.npy", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert early[0].tokens == late[0].tokens
    with pytest.raises(MusterError, match="sequence 38 is not what was written"):
        early[38]
    prepare(spec, run_dir=tmp_path / "r")
    with pytest.raises(MusterError, match="sequence 38 is not what was written"):
        late[38]
    assert open_prepared(spec, tmp_path / "r").train[38].tokens > 0


@pytest.mark.parametrize("name", ["meta.json", "sums.json", "train/counts.json", "tokenizer/tokenizer.json"])
def test_damaged_records_of_prepared_data_are_prepared_again(make_spec, tmp_path, name):
    spec = make_spec([TEXT2SQL])
    prepared = prepare(spec, run_dir=tmp_path / "r")
    path = tmp_path / "cache" / prepared.fingerprint / name
    whole = path.read_bytes()
    for broken in (whole[:-2], whole.replace(b"1", b"2", 1)):
        path.write_bytes(broken)
        with pytest.raises(MusterError, match="is damaged"):
            open_prepared(spec, tmp_path / "r")
        again = prepare(spec, run_dir=tmp_path / "r")
        assert not again.stats["cached"] and path.read_bytes() == whole
        path.write_bytes(broken)  # and found by preparation itself
        assert not prepare(spec, run_dir=tmp_path / "r").stats["cached"] and path.read_bytes() == whole


def test_ranks_never_open_another_run_files_data(make_spec, tmp_path):
    prepare(make_spec([TEXT2SQL]), run_dir=tmp_path / "r")
    corrected = make_spec([{**TEXT2SQL, "seed": 3}])
    with pytest.raises(MusterError, match="another run file"):
        open_prepared(corrected, tmp_path / "r")
    prepare(corrected, run_dir=tmp_path / "r")
    assert open_prepared(corrected, tmp_path / "r").stats["rows"] == 300


def test_what_is_left_of_other_data_is_cleared_where_nobody_can_need_it(make_spec, tmp_path):
    """A dead process's of this machine at once, but for its tokens; another machine's, and an earlier version's, after
    three days."""
    cache_folder, name, days = tmp_path / "cache", "0" * 32, 4 * 86400
    dead, alive = f"{here()}-4194999-1-ab", str(Token.new())
    for path in (f"{name}.{dead}", f".work-{name}.{dead}", f"{name}.{alive}", f"{'1' * 32}.elsewhere-1-1-ab"):
        (cache_folder / path / "train").mkdir(parents=True)
        (cache_folder / path / "train" / "labels.npy").write_bytes(b"x")
    for path in (f"{'2' * 32}.elsewhere-1-1-ab", f".partial-{'3' * 32}-a.host-77", f".kept-{'3' * 32}"):
        (cache_folder / path).mkdir()
        (cache_folder / path / "ids").write_bytes(b"x")
        os.utime(cache_folder / path / "ids", (time.time() - days,) * 2)
    (cache_folder / "mine.txt").write_text("not of Muster")
    prepared = prepare(make_spec([TEXT2SQL]), run_dir=tmp_path / "r")
    assert {path.name for path in cache_folder.iterdir()} == {
        f".work-{name}.{dead}", f"{name}.{alive}", f"{'1' * 32}.elsewhere-1-1-ab", "mine.txt",
        prepared.fingerprint, prepared.folder.name,
    }  # fmt: skip


def as_an_earlier_version_left_it(spec, tmp_path):
    """(what was prepared, its folder, which has the final name itself)."""
    prepared = prepare(spec, run_dir=tmp_path / "r")
    final = tmp_path / "cache" / prepared.fingerprint
    final.unlink()
    prepared.folder.rename(final)
    return prepared, final


def test_data_of_an_earlier_version_are_read_and_withdrawn_like_others(make_spec, tmp_path):
    spec = make_spec([TEXT2SQL])
    _, final = as_an_earlier_version_left_it(spec, tmp_path)
    assert prepare(spec, run_dir=tmp_path / "r").stats["cached"] and open_prepared(spec, tmp_path / "r").folder == final
    (final / "meta.json").write_bytes(b"{}")
    again = prepare(spec, run_dir=tmp_path / "r")
    assert not again.stats["cached"] and final.is_symlink() and final.resolve() == again.folder


def test_half_a_folder_under_the_final_name_is_no_damage(make_spec, tmp_path):
    """As an earlier version's rename on a mounted bucket left it."""
    spec = make_spec([TEXT2SQL])
    prepared, final = as_an_earlier_version_left_it(spec, tmp_path)
    (final / "sums.json").unlink()
    with pytest.raises(MusterError, match="is gone"):
        open_prepared(spec, tmp_path / "r")
    again = prepare(spec, run_dir=tmp_path / "r")
    assert not again.stats["cached"] and len(again.train) == len(prepared.train)


def test_data_on_a_read_only_mount_are_used_and_no_others_made(make_spec, tmp_path, monkeypatch):
    spec = make_spec([TEXT2SQL])
    prepared = prepare(spec, run_dir=tmp_path / "r")

    def refusing(real):
        def call(path, *args, **kwargs):
            if str(tmp_path / "cache") in f"{path} {args}":
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, *args, **kwargs)

        return call

    for name in ("symlink", "mkdir", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    assert prepare(spec, run_dir=tmp_path / "other").fingerprint == prepared.fingerprint
    with pytest.raises(AccessError, match="cannot be written: Read-only file system"):
        prepare(make_spec([{**TEXT2SQL, "seed": 4}]), run_dir=tmp_path / "other")


@pytest.fixture
def mounted(monkeypatch):
    """The cache is taken for a mounted bucket."""
    monkeypatch.setattr("muster.data.prepare.uri_of_mounted", lambda path: f"gs://bucket{path}")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_mounted_cache_gets_finished_files_alone(make_spec, tmp_path, mounted, monkeypatch):
    """It is built in the run's folder, of which nothing is left."""
    opened, real = [], open

    def spying(path, mode="r", *args, **kwargs):
        if str(path).startswith(str(tmp_path / "cache")) and mode != "r" and "r" not in mode:
            opened.append((Path(path).name, mode))
        return real(path, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", spying)
    prepared = prepare(make_spec([TEXT2SQL]), run_dir=tmp_path / "r")
    assert len(opened) == len(contents(prepared.folder)) and {mode for _, mode in opened} == {"wb"}
    assert opened[-1][0] == "sums.json"
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"data.json", "tokenizer"}
    local = prepare(make_spec([TEXT2SQL], cache_dir=str(tmp_path / "local")), run_dir=tmp_path / "r2")
    assert contents(local.folder) == contents(prepared.folder)


def test_a_copy_whose_answer_was_lost_is_looked_at_again(make_spec, tmp_path, mounted, monkeypatch):
    """GCSFuse says ESTALE at a close though the bucket has the file. What is not there is written again."""
    real, lost, told = open, set(), []

    @contextlib.contextmanager
    def losing(path, mode):
        with real(path, mode) as file:
            yield file
        if Path(path).name not in lost:
            lost.add(Path(path).name)
            if Path(path).name == "labels.npy":
                Path(path).unlink()
            raise OSError(errno.ESTALE, "Stale file handle", str(path))

    def opened(path, mode="r", *args, **kwargs):
        is_copy = mode == "wb" and Path(path).is_relative_to(tmp_path / "cache")
        return losing(path, mode) if is_copy else real(path, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", opened)
    spec = make_spec([TEXT2SQL])
    prepared = prepare(spec, run_dir=tmp_path / "r", progress=lambda *args: told.append(args))
    assert told[-1][0] == "copy to the mounted bucket" and told[-1][1] == told[-1][2] > 0
    assert len(lost) > 10 and not prepared.stats["cached"] and prepared.train[0].tokens > 0
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {prepared.fingerprint, prepared.folder.name}


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_where_there_are_no_links_a_rename_publishes(make_spec, tmp_path, monkeypatch, number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "symlink", refused)
    spec = make_spec([TEXT2SQL])
    prepared = prepare(spec, run_dir=tmp_path / "r")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [prepared.fingerprint] == [prepared.folder.name]
    (prepared.folder / "meta.json").write_bytes(b"{}")
    assert not prepare(spec, run_dir=tmp_path / "r").stats["cached"]
    assert prepare(spec, run_dir=tmp_path / "r").stats["cached"]


def test_fingerprints_do_not_depend_on_order():
    assert cache.fingerprint({"a": 1, "b": [1, 2]}) == cache.fingerprint({"b": [1, 2], "a": 1})
    assert cache.fingerprint({"a": 1}) != cache.fingerprint({"a": 2})


def test_progress_is_told(make_spec, tmp_path):
    told = []
    prepare(make_spec([TEXT2SQL]), run_dir=tmp_path / "r", progress=lambda *args: told.append(args))
    assert ("tokenise", 300, 300) in told and told[-1][0] == "pack"


def test_what_is_there_is_found_without_writing(make_spec, tmp_path, monkeypatch):
    """An agent that is started again on a full disk finds what its predecessor prepared."""
    spec = make_spec([TEXT2SQL])
    prepare(spec, run_dir=tmp_path / "run")

    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(Path, "mkdir", lambda path, **_: None if path.is_dir() else full())
    assert prepare(spec, run_dir=tmp_path / "run").stats["cached"]
    with pytest.raises(MusterError, match="no space left"):
        prepare(spec, run_dir=tmp_path / "another")
