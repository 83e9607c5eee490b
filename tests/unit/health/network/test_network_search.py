"""A slow host is named, not a pair: seeded virtual clusters, every answer exact, nobody accused wrongly."""

import itertools
import random

import pytest

from muster.health.network.judge import judge_pairs
from muster.health.network.search import Figure, assess, next_round, rotation, rotation_rounds
from muster.health.verdicts import Verdict, worst

GB_S = 180.0


class Cluster:
    """A pair is as fast as its slower member, or its path; noise is normal, on each figure."""

    def __init__(self, hosts, losses=(), *, paths=(), hung=(), noise=0.03, seed=0):
        self.hosts = [f"h{number:02d}" for number in range(hosts)]
        self.losses, self.paths, self.hung, self.noise = dict(losses), dict(paths), set(hung), noise
        self.random = random.Random(seed)

    def figure(self, pair):
        if self.hung & set(pair):
            return Figure(pair=pair, busbw=None)
        share = min(1 - self.losses.get(host, 0.0) for host in pair) * (1 - self.paths.get(tuple(sorted(pair)), 0.0))
        return Figure(pair=pair, busbw=GB_S * share * max(0.01, self.random.gauss(1, self.noise)))

    def search(self):
        """(the assessment, rounds, figures)."""
        figures, number = [], 0
        while pairs := next_round(self.hosts, figures, number):
            assert len(set(itertools.chain(*pairs))) == 2 * len(pairs), "a host's network is one pair's at a time"
            figures += [self.figure(pair) for pair in pairs]
            number += 1
        return assess(self.hosts, figures), number, figures


def seeded(seed):
    chance = random.Random(seed)
    count = chance.randint(2, 64)
    slow = chance.sample(range(count), min(count, chance.randint(0, 3)))
    return Cluster(count, {f"h{host:02d}": chance.uniform(0.10, 0.90) for host in slow}, seed=seed)


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_a_thousand_clusters_with_none_to_three_slow_hosts(first):
    """A level needs two sound hosts that are not alone; with fewer nobody sound may be accused."""
    for seed in range(first, first + 100):
        cluster = seeded(seed)
        seen, _, _ = cluster.search()
        assert seen.slow.keys() <= cluster.losses.keys(), f"seed {seed}: a sound host is accused"
        assert not seen.paths, f"seed {seed}: a sound path is accused"
        if len(cluster.hosts) > 2 and len(cluster.hosts) - len(cluster.losses) >= 2:
            assert seen.slow.keys() == cluster.losses.keys() and not seen.undecided, f"seed {seed}"
            for host, loss in seen.slow.items():
                assert loss == pytest.approx(cluster.losses[host], abs=0.06)


def test_everyone_meets_everyone_once():
    for count in (2, 3, 7, 8, 33):
        hosts = [str(number) for number in range(count)]
        rounds = [rotation(hosts, number) for number in range(count - 1 + count % 2)]
        met = [frozenset(pair) for pairs in rounds for pair in pairs]
        assert len(met) == len(set(met)) == count * (count - 1) // 2
        assert all(len(pairs) == count // 2 for pairs in rounds), "all at once, but for one that rests"


def test_thirty_two_hosts_are_first_looked_at_after_five_rounds():
    assert rotation_rounds(32) == 5
    for host in range(32):
        seen, rounds, _ = Cluster(32, {f"h{host:02d}": 0.3}, seed=host).search()
        assert seen.slow.keys() == {f"h{host:02d}"} and rounds <= 11


def test_whoever_is_undecided_meets_hosts_that_are_sound():
    cluster = Cluster(16, {"h03": 0.12})
    figures = [
        cluster.figure(pair) for number in range(rotation_rounds(16)) for pair in rotation(cluster.hosts, number)
    ]
    figures = [one for one in figures if one.pair.count("h03") == 0] + [cluster.figure(("h03", "h09"))]
    seen = assess(cluster.hosts, figures)
    assert "h03" in seen.undecided
    pairs = next_round(cluster.hosts, figures, rotation_rounds(16))
    assert all(set(pair) & seen.undecided and set(pair) & seen.sound for pair in pairs)
    assert any("h03" in pair and "h09" not in pair for pair in pairs), "with somebody new"


def test_partners_of_a_slow_host_are_not_accused():
    """After one round a pair is slow, and neither of its members is named."""
    cluster = Cluster(8, {"h05": 0.6})
    seen = assess(cluster.hosts, [cluster.figure(pair) for pair in rotation(cluster.hosts, 0)])
    assert not seen.slow
    seen, _, _ = cluster.search()
    assert seen.slow.keys() == {"h05"}


def test_slow_hosts_may_be_the_majority():
    seen, _, _ = Cluster(5, {"h00": 0.5, "h02": 0.5, "h04": 0.5}).search()
    assert seen.slow.keys() == {"h00", "h02", "h04"} and seen.level == pytest.approx(GB_S, rel=0.05)


@pytest.mark.parametrize("loss", [0.3, 0.7])
def test_a_slow_path_between_two_sound_hosts(loss):
    for seed in range(20):
        cluster = Cluster(8, paths={("h02", "h06"): loss}, seed=seed)
        figures = [cluster.figure(pair) for number in range(7) for pair in rotation(cluster.hosts, number)] * 2
        seen = assess(cluster.hosts, figures)
        assert not seen.slow and seen.paths.keys() == {("h02", "h06")}, seed
        found = judge_pairs(cluster.hosts, figures, seen)
        assert worst(found) is Verdict.NOTE and not any(one.host for one in found)


def test_a_host_whose_collectives_do_not_end():
    cluster = Cluster(9, {"h01": 0.2}, hung={"h04"})
    seen, _, figures = cluster.search()
    assert seen.slow.keys() == {"h01", "h04"}
    failures = {figure.pair: "a collective did not end within 60 s" for figure in figures if figure.busbw is None}
    found = {one.host: one for one in judge_pairs(cluster.hosts, figures, seen, failures=failures) if one.host}
    assert found["h04"].verdict is Verdict.REPLACE and "did not end" in found["h04"].evidence
    assert found["h01"].verdict in (Verdict.NOTE, Verdict.DRAIN)


def test_noise_makes_it_less_sure_and_accuses_nobody():
    for seed in range(20):
        seen, _, _ = Cluster(8, noise=0.15, seed=seed).search()
        assert not seen.slow and seen.detectable > 0.2
        seen, _, _ = Cluster(8, {"h02": 0.8}, noise=0.15, seed=seed).search()
        assert seen.slow.keys() <= {"h02"}


def test_what_scatters_too_much_is_not_called_sound():
    for noise, verdict in ((0.02, Verdict.HEALTHY), (0.1, Verdict.NOTE), (0.3, Verdict.INCOMPLETE)):
        figures = [Figure(pair=pair, busbw=1.0, spread=noise) for pair in itertools.combinations("abcd", 2)] * 4
        found = judge_pairs("abcd", figures, assess("abcd", figures))
        assert worst(found) is verdict, noise
    assert "too noisy" in found[-1].message


def test_two_hosts_have_nobody_to_be_compared_with():
    cluster = Cluster(2, {"h01": 0.8})
    seen, rounds, figures = cluster.search()
    assert rounds == 1 and not seen.slow and not seen.undecided
    (finding,) = judge_pairs(cluster.hosts, figures, seen)
    assert finding.verdict is Verdict.NOTE and "it is not known which" in finding.message


def test_nothing_measured_is_incomplete():
    for count in (2, 3, 4, 32):
        cluster = Cluster(count, hung={f"h{number:02d}" for number in range(count)})
        seen, rounds, figures = cluster.search()
        assert rounds <= 3 and not seen.slow, "each round takes as long as the limit"
        assert worst(judge_pairs(cluster.hosts, figures, seen)) is Verdict.INCOMPLETE


def test_a_host_that_hangs_costs_few_limits():
    seen, _, figures = Cluster(32, hung={"h09"}).search()
    assert seen.slow.keys() == {"h09"} and sum(figure.busbw is None for figure in figures) <= 3


def test_classes_by_loss():
    cluster = Cluster(12, {"h03": 0.14, "h07": 0.5})
    seen, _, figures = cluster.search()
    found = {one.host: one for one in judge_pairs(cluster.hosts, figures, seen) if one.host}
    assert found["h03"].verdict is Verdict.NOTE and found["h07"].verdict is Verdict.DRAIN
    assert (
        seen.slow["h07"] == pytest.approx(0.5, abs=0.05) and "slower than that of other pairs" in found["h07"].message
    )
