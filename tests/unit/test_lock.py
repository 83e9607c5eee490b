"""What is installed is what the locks name, file by file; they agree with pyproject.toml and with each other."""

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

packaging = pytest.importorskip("packaging.requirements")
canonical = pytest.importorskip("packaging.utils").canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = {
    "requirements/run.lock": ("train", "data"),
    "requirements/all.lock": ("train", "data", "gcs", "s3", "gke", "inspect", "gke-test", "test", "dev"),
    "src/muster/backends/gke/provision/requirements.lock": ("train", "data", "gcs", "gke"),
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages(lock):
    """Name -> [(version, the marker's text, number of hashes)]."""
    result = {}
    for entry in (ROOT / lock).read_text().replace("\\\n", " ").splitlines():
        if entry and not entry.startswith("#"):
            words, *hashes = entry.split("--hash=")
            requirement = packaging.Requirement(words.strip())
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", entry
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", word) for word in hashes), entry
            row = (specifier.version, str(requirement.marker or ""), len(hashes))
            result.setdefault(canonical(requirement.name), []).append(row)
    return result


def asked(extras):
    project = PROJECT["project"]
    lines = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return [one for one in map(packaging.Requirement, lines) if one.name not in ("torch", "muster-gpu")]


@pytest.mark.parametrize(("lock", "extras"), LOCKS.items())
def test_a_lock_holds_what_pyproject_asks_for_and_a_hash_of_each(lock, extras):
    held = packages(lock)
    assert all(hashes for rows in held.values() for _, _, hashes in rows)
    for requirement in asked(extras):
        assert canonical(requirement.name) in held, f"{requirement}: write the locks anew with tools/lock.py"
        assert all(requirement.specifier.contains(version) for version, _, _ in held[canonical(requirement.name)]), (
            requirement
        )
    of_torch = [name for name in held if name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))]
    assert not set(of_torch) - {"nvidia-ml-py"}, "that one asks the driver and is no part of a CUDA build"


def test_the_locks_name_the_same_versions():
    everything = packages("requirements/all.lock")
    for lock in LOCKS:
        for name, rows in packages(lock).items():
            assert {version for version, _, _ in rows} <= {version for version, _, _ in everything[name]}, (lock, name)


def test_the_checking_tools_are_those_of_the_constraints():
    pins = re.findall(r"^([a-z-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    held = packages("requirements/all.lock")
    assert {name: [version] for name, version in pins if name != "torch"} == {
        name: [version for version, _, _ in held[name]] for name, _ in pins if name != "torch"
    }


def test_nothing_is_installed_past_the_locks():
    """setup.sh installs torch by its version, everything else by a lock, and this package without what it asks for."""
    lines = (ROOT / "setup.sh").read_text().splitlines()
    installs = [line for line in lines if re.match(r"\s+pip install", line)]
    assert len(installs) == 5 and all("--no-deps" in line or "$arguments" in line for line in installs), installs
    assert "--require-hashes" in installs[0], "pip checks no hash of what torch has brought before"
    dockerfile = (ROOT / "src/muster/backends/gke/provision/Dockerfile").read_text()
    assert re.findall(r"pip install (\S+)", dockerfile) == ["--no-deps", '"torch==${TORCH}"'], "torch brings no other"
    assert "--require-hashes -r /opt/muster/requirements.lock" in dockerfile


@pytest.mark.parametrize("tampered", [False, True])
def test_pip_takes_no_file_with_another_hash(tmp_path, tampered):
    """With pip itself, as setup.sh calls it."""
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing.py", "")
        archive.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        archive.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("thing-1.0.dist-info/RECORD", "")
    lock = tmp_path / "a.lock"
    lock.write_text(f"thing==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    if tampered:
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("more.py", "")
    argv = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", str(lock)),
        *("--no-index", "--find-links", str(tmp_path), "--target", str(tmp_path / "site")),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) is tampered, done.stderr
    assert (tmp_path / "site" / "thing.py").exists() is not tampered
    assert ("DO NOT MATCH THE HASHES" in done.stderr) is tampered
