"""In which rows documents are trained: several in one, one each, or a micro-batch each; and what is said of it."""

import pytest
from fakes.small_model import CPU, LLAMA, build, process_group

from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.data.prepare import prepare
from muster.train.data_feed.batch import batch_from
from muster.train.separation import separate

LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16},
    **{"short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
}


@pytest.fixture
def made(tmp_path):
    """A run file's parts as ``separate`` takes them."""

    def make(config, *, length=128, packing=True, level=1):
        source = {"type": "text2sql", "rows": 60, "heldout_rows": 6, "level": level}
        spec = RunSpec.model_validate(
            {
                "name": "case",
                "model": {"config": config, "dtype": "float32", "tokenizer": {"kind": "word"}},
                "data": {"sources": [source], "packing": packing, "cache_dir": str(tmp_path / "cache")},
                "training": {"sequence_length": length, "micro_batch_size": 2, "global_batch_size": 4, "steps": 1},
            }
        )
        prepared = prepare(spec, run_dir=tmp_path / f"run-{length}-{packing}")
        with process_group():
            return spec, prepared, build(spec, vocab_size=prepared.vocab_size)

    return make


def test_a_model_that_keeps_documents_apart_gets_what_was_prepared(made):
    spec, prepared, built = made({**LLAMA, "max_position_embeddings": 256})
    separated = separate(spec, prepared, built)
    assert separated.report is None and separated.spec == spec and separated.prepared == prepared
    assert prepared.train.cut_to is None


def test_another_gets_a_document_a_row_and_is_told_of_the_fill(made):
    spec, prepared, built = made({**LLAMA, "model_type": "falcon", "alibi": True})
    separated = separate(spec, prepared, built)
    train, heldout = separated.prepared.train, separated.prepared.heldout
    assert len(train) == prepared.train.counts["documents"] > len(prepared.train)
    assert len(heldout) == prepared.heldout.counts["documents"]
    assert separated.prepared.fingerprint != prepared.fingerprint, "no checkpoint of the other order is continued"
    fill = train.tokens / (len(train) * 128)
    assert "falcon does not keep documents in a row apart with attention sdpa" in separated.report
    assert separated.report.endswith(f"{len(train)} rows, {fill:.1%} of their positions are tokens")
    batch = batch_from(train, (0, 1), CPU)
    assert batch.input_ids.shape == (2, 64) and len(batch.cu_seqlens) == 5
    built.module.compiled = True
    compiled = separate(spec, prepared, built).prepared.train
    assert batch_from(compiled, (0,), CPU).input_ids.shape == (1, 128)


def test_what_was_asked_for_is_no_news(made):
    spec, prepared, built = made({**LLAMA, "max_position_embeddings": 256}, packing=False)
    assert built.proof.unpacked == "data.packing is false"
    separated = separate(spec, prepared, built)
    assert separated.report is None and separated.prepared == prepared and prepared.train.cut_to is None


def test_pairs_whose_documents_would_be_alone_are_refused(made):
    spec, prepared, built = made({**LLAMA, "max_position_embeddings": 256, "rope_scaling": LONGROPE})
    training = spec.training.model_copy(update={"objective": "dpo"})
    with pytest.raises(
        UsageError, match=r"training\.objective is not possible: the answers of a pair share a row, and its"
    ):
        separate(spec.model_copy(update={"training": training}), prepared, built)


def test_documents_beyond_a_rotary_border_are_alone_in_their_micro_batches(made):
    config = {**LLAMA, "max_position_embeddings": 256, "rope_parameters": LONGROPE}
    spec, prepared, built = made(config)
    separated = separate(spec, prepared, built)
    longest = prepared.train.longest_document
    assert longest > 16 and separated.spec.training.micro_batch_size == 1
    longest = max(longest, prepared.heldout.longest_document)
    assert f"is longer than 16 ({longest} here)" in separated.report
    lengths = [batch_from(separated.prepared.train, (index,), CPU).input_ids.shape[1] for index in range(8)]
    assert lengths == [separated.prepared.train[index].tokens for index in range(8)]


def test_documents_within_it_share_rows_whose_padding_stays_within_it(made):
    config = {**LLAMA, "max_position_embeddings": 256}
    config["rope_parameters"] = {**LONGROPE, "original_max_position_embeddings": 100}
    spec, prepared, built = made(config)
    separated = separate(spec, prepared, built)
    assert separated.report is None and separated.spec == spec
    assert max(int(row.position_ids.max()) for row in separated.prepared.train) < 100


def test_dynamic_embeddings_with_longer_documents_are_refused(made):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    spec, prepared, built = made({**LLAMA, "max_position_embeddings": 16, "rope_parameters": rope})
    with pytest.raises(UsageError, match=r"of type dynamic .* more than 16"):
        separate(spec, prepared, built)
