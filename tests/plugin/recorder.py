"""Which files of the repository each test file opens, lists and loads: a pytest plugin, where ``MUSTER_RECORD`` names
a file. ``site/sitecustomize.py`` has the hook, in this process and in every Python that a test starts.

Two calls are wrapped here, since they open nothing: ``importlib.import_module`` of a module that is loaded already, and
``os.stat`` (``Path.exists``), in this process alone.
"""

import importlib
import os
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest

from tests.plugin.closure import covers, matches
from tests.plugin.site import sitecustomize


def pytest_configure(config):
    site = str(Path(sitecustomize.__file__).parent)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != site]
    os.environ["PYTHONPATH"] = os.pathsep.join([site, *paths])
    recorder = sitecustomize.install()
    load, stat = importlib.import_module, os.stat

    def noted_stat(path, *arguments, **named):
        if not str(path).endswith(".py"):
            recorder.hook("open", (path,))
        return stat(path, *arguments, **named)

    def import_module(name, package=None):
        module = load(name, package)
        if (file := getattr(module, "__file__", None)) and file.startswith(sitecustomize.ROOT):
            recorder.note("open", file[len(sitecustomize.ROOT) :])
        return module

    importlib.import_module = import_module
    for family in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        family.add(noted_stat)
    os.stat = noted_stat


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    if not isinstance(collector, pytest.Module):
        return (yield)
    _set_test(collector.nodeid)
    done = yield
    _set_test("")
    return done


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    _set_test(item.nodeid.partition("::")[0])
    done = yield
    _set_test("")
    return done


def _set_test(test):
    sys._muster_recorder.set_test(test)
    reach = sys.modules.get("muster._reach")  # the mutation check's copy of src has it
    if reach is not None:
        reach.seen.clear()


def undeclared(graph, record):
    """Test file -> the ``reads`` and ``loads`` by which all that it opened would be among its inputs: folders that it
    listed as globs, modules with what these import. ``record``: the file that ``MUSTER_RECORD`` named."""
    opened, listed = defaultdict(set), defaultdict(set)
    for line in set(record.read_text().splitlines()):
        test, kind, path = line.split("\t")
        if not path.startswith("tests/plugin/"):
            (opened if kind == "open" else listed)[test].add(path)
    tests = sorted((opened.keys() | listed.keys()) & set(graph.test_files))
    needs = {test: _needs(graph, test, opened[test], listed[test]) for test in tests}
    return {test: found for test, found in needs.items() if found}


def _needs(graph, test, opened, listed):
    inputs, declared = graph.inputs(test), graph.declared(test, "reads")
    globs = []
    seen = listed | {str(Path(path).parent) for path in opened}
    for folder in sorted(listed & graph.folders.keys()):  # one pattern where all folders below were listed or read
        below = graph.folders[folder]
        pattern = f"{folder}/**" if folder and len(below) > 1 and below <= seen else f"{folder}/*"
        if folder not in below and not pattern.endswith("**"):
            continue  # folders alone
        if not any(covers(known, pattern) for known in (*globs, *declared)):
            globs.append(pattern.removeprefix("/"))
    missing = {path for path in (opened & graph.hashes.keys()) - inputs if not any(map(partial(matches, path), globs))}
    loads = []
    for path in sorted(missing & graph.facts.keys(), key=lambda path: (-len(graph.closure(path)), path)):
        if path in missing:
            loads.append(path)
            missing -= graph.closure(path)
    found = {"loads": sorted(loads), "reads": sorted({*globs, *(missing - graph.facts.keys())})}
    return {kind: names for kind, names in found.items() if names}
