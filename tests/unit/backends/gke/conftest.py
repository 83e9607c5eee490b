"""Makes ``fakes`` and the golden cases importable, and says where reference data is absent."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[3]
for folder in (TESTS, TESTS / "golden" / "gke"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def definitions():
    from fakes.crds import CRDS, Definitions

    if not CRDS.is_dir():
        pytest.skip(f"no CustomResourceDefinitions at {CRDS}")
    pytest.importorskip("cel", reason="common-expression-language is not installed")
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    return Definitions()
