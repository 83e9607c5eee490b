"""What a rank reads before it trains: prepared data and pretrained weights. A long wait for either is progress."""

from __future__ import annotations

from pathlib import Path

from muster.config.spec import RunSpec
from muster.core.errors import MusterError
from muster.data.prepare import Prepared, open_prepared, prepare
from muster.data.weights import model_files
from muster.protocol.ranks import AgentClient

#: How long a part of data preparation counts as progress: training a tokenizer or packing reports none meanwhile.
PREPARE_LIMIT_S = 1800.0
#: The same for the download of pretrained weights: 140 GB at 40 MB/s.
FETCH_LIMIT_S = 3600.0


def open_data(spec: RunSpec, run_dir: Path, agent: AgentClient) -> Prepared:
    """The prepared data; prepared here if that was not done before the ranks started (torchrun), or it is damaged.

    One rank of a host builds it, the others wait; what it does counts as progress, since it may take longer than a
    start.
    """
    try:
        return open_prepared(spec, run_dir)
    except MusterError:
        agent.progress(for_s=PREPARE_LIMIT_S)
        prepared = prepare(
            spec, run_dir=run_dir, progress=lambda activity, done, total: agent.progress(for_s=PREPARE_LIMIT_S)
        )
        agent.progress()
        return prepared


def fetch_weights(spec: RunSpec, run_dir: Path, agent: AgentClient) -> RunSpec:
    """``spec`` with ``model.revision`` at the commit that data preparation fetched; its files are then on this machine.

    Where that was not done before the ranks started (torchrun) they are fetched here: it counts as progress, since it
    may take longer than a start. Then all ranks of a host ask at once, and the hub's cache lets one load each file.
    Raises as ``model_files.fetch``.
    """
    assert spec.model is not None
    model = model_files.pinned(spec.model, run_dir)
    if model.source is None or Path(model.source).is_dir():
        return spec
    agent.progress(for_s=FETCH_LIMIT_S)
    model_files.fetch(model.source, model.revision)
    agent.progress()
    return spec.model_copy(update={"model": model})
