"""The phases of a run, and the ways between them, as ``docs/explanation/recovery.md`` has them."""

import re
from pathlib import Path

from muster.supervise.recovery import phases

TEXT = (Path(__file__).parents[2] / "docs" / "explanation" / "recovery.md").read_text()
_PHASES = {each.__name__: each for each in phases.Phase.__subclasses__()}
#: (from, to), by the table; each once.
TABLE = [
    (_PHASES[source], _PHASES[target])
    for source, _, target in re.findall(r"^\| (\w+) \| (.+) \| (\w+) \|$", TEXT, re.MULTILINE)
    if source in _PHASES and target in _PHASES
]
#: The same, by the picture.
PICTURE = [
    (_PHASES[source], _PHASES[target]) for source, target in re.findall(r"^ +(\w+) --> (\w+)$", TEXT, re.MULTILINE)
]
