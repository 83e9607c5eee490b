"""Data that ranks find damaged is prepared again while their agent hears that they make progress."""

from pathlib import Path

from muster.config.spec import RunSpec
from muster.data.prepare import prepare
from muster.rank.standalone_client import StandaloneClient
from muster.train.inputs import open_data


class Client(StandaloneClient):
    """Remembers for how long each report of progress holds."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def progress(self, *, for_s: float = 0.0) -> None:
        self.told.append(for_s)


def test_preparation_by_ranks_counts_as_progress_while_it_lasts(tmp_path: Path) -> None:
    spec = RunSpec.model_validate(
        {
            "name": "test",
            "model": {"config": {"vocab_size": 512}},
            "data": {"sources": [{"type": "random", "rows": 40}], "cache_dir": str(tmp_path / "cache"), "workers": 1},
            "training": {"sequence_length": 64},
        }
    )
    agent = Client()
    prepared = prepare(spec, run_dir=tmp_path / "r")
    open_data(spec, tmp_path / "r", agent)
    assert not agent.told  # nothing to prepare
    (prepared.folder / "train" / "labels.npy").write_bytes(b"")
    assert len(open_data(spec, tmp_path / "r", agent).train) == len(prepared.train)
    *reports, last = agent.told
    assert last == 0.0 and len(reports) > 2 and min(reports) > 600
