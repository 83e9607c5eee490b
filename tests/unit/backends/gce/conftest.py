"""Makes ``fakes`` and the golden cases importable."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[3]
for folder in (TESTS, TESTS / "golden" / "gce"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
