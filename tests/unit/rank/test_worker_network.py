"""Which ranks measure their network before they train."""

from types import SimpleNamespace

import pytest

from muster.config.spec import RunSpec
from muster.core.types import Layout
from muster.protocol.ranks import RankContext
from muster.rank import worker


class Measures(Exception):
    pass


class Trains(Exception):
    pass


@pytest.mark.parametrize(
    ("asked", "attempt", "device", "expected"),
    [
        (True, 1, "cpu", Measures),
        (True, 1, "cuda", Measures),
        (False, 1, "cpu", Trains),
        (True, 2, "cpu", Trains),  # a recovery: seconds count
        (True, 1, "tpu", Trains),
    ],
)
def test_who_was_asked_measures_once_before_it_trains(monkeypatch, asked, attempt, device, expected):
    spec = RunSpec.model_validate({"name": "x", "check": {"network": asked}, "resources": {"device": device}})
    context = RankContext(
        run_id="r", run_dir="/unused", attempt=attempt, host="h0", rank=1, local_rank=0, world_size=2,
        local_world_size=1, layout=Layout(), master_addr="127.0.0.1", master_port=1,
    )  # fmt: skip

    def raises(error):
        def reached(*words, **more):
            raise error

        return reached

    monkeypatch.setattr(worker, "read_spec", lambda folder: spec)
    monkeypatch.setattr(worker, "choose_device", lambda *words: SimpleNamespace(type="cuda"))
    for name in ("set_numerics", "stay_near", "join_world"):
        monkeypatch.setattr(worker, name, lambda *words: None)
    monkeypatch.setattr(worker.network, "measure", raises(Measures))
    monkeypatch.setattr(worker, "make_components", raises(Trains))
    monkeypatch.setattr("muster.train_jax.components.make_components", raises(Trains))
    with pytest.raises(expected):
        worker.run_rank(context, SimpleNamespace(emit=lambda *words, **more: None), store=object())
