"""The state of somebody else's loop as tensors and back: what is a rank's own, what must be the same everywhere."""

import threading

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint import exchange  # noqa: E402
from muster.core.errors import CheckpointError, UsageError  # noqa: E402
from muster.train import user_state  # noqa: E402
from muster.train.user_state import PLAIN, copy_tensors, first_difference, flatten, refuse_difference, unflatten  # noqa: E402


class Loader:
    """As a data loader: a position, and a generator's bytes."""

    def __init__(self, place=0, seed=0):
        self.place, self.generator = place, torch.Generator().manual_seed(seed)

    def state_dict(self):
        return {"place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, found):
        self.place = found["place"]
        self.generator.set_state(found["generator"])


def parts(seed, place):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    for _ in range(place):
        model(torch.randn(1, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "rank2.loader": Loader(place, seed)}


def test_everything_comes_back_and_a_ranks_own_stands_under_its_name():
    before, after = parts(1, 4), parts(2, 1)
    saved = {name: tensor.clone() for name, tensor in flatten(before).items()}
    assert {"rank2.loader.generator", f"rank2.{PLAIN}", PLAIN, "model.weight"} <= set(saved)
    assert b"loader" not in bytes(saved[PLAIN].numpy())
    tensors = flatten(after)
    copy_tensors(saved, tensors, step=4)
    assert unflatten(after, tensors) == []
    assert torch.equal(before["model"].weight, after["model"].weight)
    assert after["rank2.loader"].place == 4 and after["schedule"].last_epoch == 4
    assert after["optimizer"].param_groups[0]["lr"] == before["optimizer"].param_groups[0]["lr"]
    draws = [torch.randn(2, generator=each["rank2.loader"].generator) for each in (before, after)]
    assert torch.equal(*draws)


def test_what_could_not_be_given_back_is_refused_by_name():
    with pytest.raises(UsageError, match="'epoch' is a int"):
        flatten({"epoch": 3})
    with pytest.raises(UsageError, match="'mine' is a dict"):
        flatten({"mine": {"weights": torch.zeros(1)}})
    loader = Loader()
    loader.place = object()
    with pytest.raises(UsageError, match=r"rank0\.loader\.place is neither a tensor nor JSON"):
        flatten({"rank0.loader": loader})
    assert set(flatten({"none": None})) == {PLAIN}


def test_a_saved_value_without_a_place_is_named():
    class Grown(Loader):
        def state_dict(self):
            return {**super().state_dict(), "epoch": 2}

    tensors = flatten({"loader": Grown(), "other": Loader()})
    assert unflatten({"loader": Loader(), "other": Loader()}, tensors) == ["loader.epoch"]


def test_a_snapshot_that_does_not_fit_is_one_line():
    with pytest.raises(CheckpointError, match=r"step 7 do not fit this state: they lack b of shape \[2\]"):
        copy_tensors({"a": torch.zeros(1), "b": torch.zeros(3)}, {"a": torch.zeros(1), "b": torch.zeros(2)}, step=7)


# ---------------------------------------------------------------- the same on every rank


@pytest.fixture
def ranks(monkeypatch):
    """ask(state of rank 0, of rank 1, ...): every rank's answer; ranks are threads, their group a meeting place."""

    def ask(*states):
        told, meet, answers = [None] * len(states), threading.Barrier(len(states), timeout=10), [None] * len(states)

        def gather(value, rank):
            told[rank] = value
            meet.wait()
            found = list(told)
            meet.wait()
            return found

        monkeypatch.setattr(exchange, "gather", gather)

        def run(rank):
            answers[rank] = first_difference(flatten(states[rank]), rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(states))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(answers)) == 1, "every rank has the same answer"
        return answers[0]

    return ask


def test_what_differs_is_named(ranks):
    weights, large = torch.arange(5.0), torch.zeros(1 << 17)
    other = large.clone()
    other[70_000:] += 1
    same = {"model": weights, "large": large, "loader": Loader(3)}
    assert ranks(same, dict(same), dict(same)) is None
    assert ranks(same, {**same, "loader": Loader(4)}) == "loader.place differs between ranks 0 and 1"
    assert ranks(same, same, {**same, "loader": Loader(3, seed=1)}) == "loader.generator differs between ranks 0 and 2"
    assert ranks(same, {**same, "large": other}) == "large differs between ranks 0 and 1"
    assert ranks(same, {**same, "large": other[:9]}) == "large differs between ranks 0 and 1"
    assert ranks(same, {**same, "more": weights}) == "rank 1 holds more and rank 0 does not"


def test_what_says_whose_it_is_may_differ(ranks):
    same = {"model": torch.arange(5.0)}
    assert ranks({**same, "rank0.loader": Loader(1)}, {**same, "rank1.loader": Loader(2)}, same) is None
    found = ranks({**same, "rank0.loader": Loader(1)}, {**same, "rank0.loader": Loader(2)})
    assert found == f"rank0.{PLAIN} differs between ranks 0 and 1"


def test_the_refusal_says_what_to_do(monkeypatch):
    monkeypatch.setattr(user_state, "first_difference", lambda *_: "loader.place differs between ranks 0 and 1")
    with pytest.raises(UsageError, match=r"loader\.place differs .* one value under a name") as raised:
        refuse_difference({}, None)
    assert 'state[f"rank{dist.get_rank()}.loader"]' in raised.value.hint
