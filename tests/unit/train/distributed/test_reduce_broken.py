"""A group whose ``wait`` returns although it was cut, as NCCL's does: no update may be made of such sums.

NCCL itself is not here: the group is a stand-in that behaves as PyTorch's sources say ProcessGroupNCCL does.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from muster.protocol.ranks import LOST_PEER
from muster.train.distributed.process_groups import GroupAborter, confirm_completed
from muster.train.distributed.reduce import REPLICATE, FloatReducer, ReduceGroups

CPU = torch.device("cpu")


class Streams:
    """A group over two replicas that hold the same: its works put things in order and say nothing."""

    def __init__(self, aborter: GroupAborter, *, name: str = "nccl", breaks_at: int | None = None) -> None:
        self.aborter, self.name, self.breaks_at = aborter, name, breaks_at
        self.error = "SUCCESS"
        self.works, self.aborted, self.broken_at_abort = 0, False, None

    def size(self) -> int:
        return 2

    def _get_backend_name(self) -> str:
        return self.name

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(get_error=lambda: SimpleNamespace(name=self.error))

    def abort(self) -> None:
        self.broken_at_abort, self.aborted = self.aborter.aborted, True

    def allreduce(self, tensors: Any, options: Any) -> Any:
        self.works += 1
        if self.works == self.breaks_at:
            self.aborter()  # the pause is heard by another thread while this one waits
        if not self.aborted:
            tensors[0].mul_(2)
        return SimpleNamespace(wait=lambda: True)


def watched(**more: Any) -> tuple[GroupAborter, Streams, ReduceGroups]:
    aborter = GroupAborter()
    group: Any = Streams(aborter, **more)
    assert aborter.watch(lambda: group) is group
    return aborter, group, ReduceGroups({REPLICATE: group}, aborter)


def one_step(axes: ReduceGroups, weight: nn.Parameter) -> None:
    """As the loop does it: sums, then the update."""
    module = nn.Module()
    module.weight = weight
    reducer = FloatReducer(module, axes, accumulate_locally=False)
    reducer.begin(micro_batches=1)
    loss = (weight**2).sum()
    loss.backward()
    reducer.add_loss(loss)
    reducer.finish()
    with torch.no_grad():
        weight -= 0.1 * weight.grad


def test_whole_sums_are_applied() -> None:
    _, group, axes = watched()
    weight = nn.Parameter(torch.ones(3))
    one_step(axes, weight)
    assert group.works == 2 and torch.allclose(weight, torch.full((3,), 0.6)), "2 w twice, from both replicas"


@pytest.mark.parametrize("breaks_at", [1, 2])
def test_no_update_is_made_of_sums_that_were_cut(breaks_at: int) -> None:
    _, group, axes = watched(breaks_at=breaks_at)
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError) as raised:
        one_step(axes, weight)
    assert torch.equal(weight, torch.ones(3)), "the update would have been half of it"
    assert LOST_PEER.search(str(raised.value)), "the rank stands still, and does not fail"
    assert group.aborted and group.broken_at_abort, "the break is noted before anything ends by it"


def test_an_abort_of_the_groups_own_is_no_success_either() -> None:
    _, group, axes = watched()
    group.error = "COMM_ERROR"
    with pytest.raises(RuntimeError, match="NCCL aborted"):
        axes.sum_everywhere_(torch.ones(2))


def test_a_group_without_such_a_note_is_trusted() -> None:
    aborter, group, _ = watched()
    group._get_backend = lambda device: SimpleNamespace(get_error=refuse)
    confirm_completed(group, aborter, CPU)


def refuse() -> None:
    raise RuntimeError("Backend does not support getError")


def test_gloo_raises_by_itself_and_is_asked_nothing() -> None:
    aborter, group, axes = watched(name="gloo")
    aborter.aborted = True  # broken behind the last sum, which was whole
    assert torch.equal(axes.sum_everywhere_(torch.ones(2)), torch.full((2,), 2.0)) and group.works == 1


def test_on_a_gpu_the_device_is_waited_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    aborter, group, _ = watched()

    def synchronize() -> None:
        aborter()  # the kernels end because somebody aborts them

    stream = SimpleNamespace(synchronize=synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with pytest.raises(RuntimeError, match="NCCL aborted"):
        confirm_completed(group, aborter, torch.device("cuda", 0))
