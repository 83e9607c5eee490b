"""Check the invariants I1-I8 in recorded runs: ``python tools/check_invariants.py [--json] RUN_DIR...``.

The checks are in ``muster.report.invariants``, which shares no code with what wrote the history.
"""

import sys

from muster.report.invariants import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
