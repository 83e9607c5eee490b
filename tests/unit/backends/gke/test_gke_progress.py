"""The tree of what ``up`` and ``down`` do: the real graph, folded from events."""

import threading

import pytest
from fakes.project import INSTALLED, SITES, cloud, session

from muster.app.cluster.progress_tree import Began, Changed, Planned, Said, Tree, parents
from muster.backends.gke.provision.up import down, planned, resources, up
from muster.core.errors import CapacityError, ConflictError

NODES = (
    Planned(key="services"),
    Planned(key="net", needs=("services",)),
    Planned(key="sub", needs=("net",)),
    Planned(key="cluster", needs=("services", "net", "sub"), bills="a cluster", usd_per_hour=0.25),
    Planned(key="pool", needs=("cluster", "sub", "elsewhere")),
)


def begun(making=True):
    tree = Tree()
    tree.take(Began(title="making", making=making, nodes=NODES), 100.0)
    return tree


def words(tree, now_s=100.0):
    return {row.key: row.text for row in tree.rows(now_s)}


def test_each_stands_below_the_deepest_of_its_needs():
    above = {"services": None, "net": "services", "sub": "net", "cluster": "sub", "pool": "cluster"}
    assert parents(NODES) == above
    assert [row.key for row in begun().rows(0.0)] == list(above), "parents come before what stands below them"


def test_waiting_says_for_what():
    tree = begun()
    assert words(tree) == {
        "services": "next",
        "net": "waiting for services",
        "sub": "waiting for net",
        "cluster": "waiting for services, net and 1 more",
        "pool": "waiting for cluster, sub",
    }
    for key in ("services", "net"):
        tree.take(Changed(key=key, step="there"), 101.0)
    assert words(tree)["sub"] == "next" and words(tree)["cluster"] == "waiting for sub"


def test_removing_waits_the_other_way_round():
    tree = begun(making=False)
    assert words(tree)["pool"] == "next" and words(tree)["cluster"] == "waiting for pool"
    tree.take(Changed(key="pool", step="gone"), 101.0)
    assert words(tree)["cluster"] == "next" and words(tree)["sub"] == "waiting for cluster"


def test_seconds_are_those_of_the_work():
    tree = begun()
    tree.take(Changed(key="net", step="looking"), 101.0)
    tree.take(Changed(key="net", step="making"), 102.0)
    seconds = {row.key: row.seconds for row in tree.rows(107.0)}
    assert seconds["net"] == 5.0 and seconds["pool"] is None
    tree.take(Changed(key="net", step="there"), 110.0)
    tree.take(Changed(key="sub", step="there"), 110.0)
    seconds = {row.key: row.seconds for row in tree.rows(1000.0)}
    assert seconds["net"] == 8.0 and seconds["sub"] is None, "what was there already took no time"


def test_trouble_is_said_where_it_is():
    tree = begun()
    tree.take(Changed(key="pool", step="failed", text="GCE_STOCKOUT: none"), 101.0)
    row = next(row for row in tree.rows(101.0) if row.key == "pool")
    assert (row.state, row.text) == ("trouble", "failed: GCE_STOCKOUT: none")


def test_what_bills_is_what_exists():
    tree = begun()
    assert tree.bills() == []
    tree.take(Changed(key="cluster", step="making"), 101.0)
    assert [one.key for one in tree.bills()] == ["cluster"], "it bills from the moment it is asked for"
    tree.take(Changed(key="cluster", step="looking"), 102.0)
    assert tree.bills(), "a look changes nothing"
    tree.take(Changed(key="cluster", step="gone"), 102.0)
    assert tree.bills() == []


def test_an_unknown_key_and_a_sentence_change_nothing():
    tree = begun()
    before = tree.rows(101.0)
    tree.take(Changed(key="nobody", step="there"), 101.0)
    tree.take(Said(text="hello"), 101.0)
    assert tree.rows(101.0) == before


# ---------------------------------------------------------------- of a real up and down


def events_of(work):
    tree, seen, lock = Tree(), [], threading.Lock()

    def take(event):
        with lock:
            seen.append(event)
            tree.take(event, float(len(seen)))

    return tree, seen, lambda: work(take)


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("name", SITES)
def test_up_and_down_tell_of_every_resource(name, workers):
    google = cloud()
    tree, seen, go = events_of(lambda take: up(SITES[name], session(google), INSTALLED, workers=workers, progress=take))
    go()
    assert {row.text for row in tree.rows(1e6)} == {"there"}
    began = [event for event in seen if isinstance(event, Began)]
    assert len(began) == 1 and began[0].nodes == planned(resources(SITES[name], INSTALLED))
    made = [event.key for event in seen if isinstance(event, Changed) and event.step == "making"]
    assert len(made) == len(set(made)) == len(began[0].nodes), "each is made once"
    there = set()
    needs = {one.key: set(one.needs) for one in began[0].nodes}
    for event in seen:
        if isinstance(event, Changed) and event.step == "making":
            assert needs[event.key] <= there, f"{event.key} was begun before what it needs"
        if isinstance(event, Changed) and event.step == "there":
            there.add(event.key)
    (cluster,) = [one for one in tree.bills() if one.key == "clusters/muster"]
    assert cluster.usd_per_hour == pytest.approx(0.10 + 0.134)

    tree, _, go = events_of(lambda take: down([SITES[name]], session(google), workers=workers, progress=take))
    go()
    assert {row.text for row in tree.rows(1e6)} == {"gone", "kept"}
    assert [row.key for row in tree.rows(1e6) if row.text == "kept"] == ["services"] and tree.bills() == []


def test_again_tells_that_everything_is_there_and_took_no_time():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED)
    tree, _, go = events_of(lambda take: up(SITES["a4"], session(google), INSTALLED, workers=1, progress=take))
    go()
    assert {(row.text, row.seconds) for row in tree.rows(1e6)} == {("there", None)}


def test_a_failure_is_on_its_resource_and_the_rest_waits():
    google = cloud(fail={"b200": ("GCE_STOCKOUT", "no room for it")})
    tree, _, go = events_of(lambda take: up(SITES["a4"], session(google), INSTALLED, workers=1, progress=take))
    with pytest.raises(CapacityError):
        go()
    (trouble,) = [row for row in tree.rows(1e6) if row.state == "trouble"]
    assert trouble.key == f"nodePools/{SITES['a4'].pool}" and "no room for it" in trouble.text


def test_a_difference_is_on_its_resource_before_anything_is_made():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    pool = next(one for key, one in google.store.items() if key.endswith(SITES["a4"].pool))
    pool["config"]["machineType"] = "a3-ultragpu-8g"
    tree, _, go = events_of(lambda take: up(SITES["a4"], session(google), INSTALLED, workers=1, progress=take))
    with pytest.raises(ConflictError):
        go()
    (trouble,) = [row for row in tree.rows(1e6) if row.state == "trouble"]
    assert trouble.text.startswith("differs: ") and "a3-ultragpu-8g" in trouble.text
