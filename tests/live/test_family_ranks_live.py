"""Families cut over two ranks: loss and gradients of a plain transformers model. All of them at night."""

import json
import multiprocessing

import pytest
from every_family import COVERING, families
from family_ranks import main
from thorough import usually

pytestmark = pytest.mark.live

NAMES = (usually(0, nightly=1) and tuple(families())) or COVERING
RANKS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("families"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["family_ranks"])
    ranks = [
        context.Process(target=main, args=(rank, RANKS, f"{folder}/store", NAMES, folder)) for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(900)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    return [json.loads(open(f"{folder}/{rank}.json").read()) for rank in range(RANKS)]


@pytest.mark.parametrize("family", NAMES)
def test_two_ranks_compute_what_transformers_does(family, results):
    for result in results:
        assert isinstance(result[family], list), result[family]
        loss, gradient = result[family]
        assert loss < 1e-4 and gradient < 1e-3, result[family]
