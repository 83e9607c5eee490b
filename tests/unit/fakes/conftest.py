"""Makes the golden cases importable."""

import sys
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "gke"
if str(GOLDEN) not in sys.path:
    sys.path.insert(0, str(GOLDEN))
