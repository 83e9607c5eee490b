"""The messages as two releases know them: a class does not change while ``PROTOCOL`` stays.

After a change: raise ``PROTOCOL`` in ``muster/protocol/version.py``, then
``PYTHONPATH=.:src python tests/unit/protocol/test_schema_golden.py`` writes the new table.
"""

import json
import sys
from pathlib import Path

from muster.protocol.codec import kind_of
from muster.protocol.tables import CHANNELS
from muster.protocol.version import PROTOCOL
from tools.reference_docs import shapes

GOLDEN = Path(__file__).with_name("schema.json")


def schema():
    channels = {channel.name: [kind_of(cls) for cls in channel.messages] for channel in CHANNELS}
    return {"protocol": PROTOCOL, "channels": channels, "classes": {name: dict(one) for name, one in shapes().items()}}


def test_no_message_changes_while_the_protocol_stays():
    written, now = json.loads(GOLDEN.read_text()), schema()
    assert now["protocol"] == written["protocol"], "write the new table (see this file)"
    assert now == written, "raise PROTOCOL in muster/protocol/version.py, and write the new table (see this file)"


if __name__ == "__main__":
    new = schema()
    if GOLDEN.exists() and (old := json.loads(GOLDEN.read_text()))["protocol"] == PROTOCOL and old != new:
        sys.exit("a message has changed: raise PROTOCOL first")
    GOLDEN.write_text(json.dumps(new, indent=1) + "\n")
