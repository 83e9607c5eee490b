"""Exit codes of a host's own programs that the program which started them acts on."""

from __future__ import annotations

#: An agent that left because no supervisor came and it had no work: the host is free, the run may go on elsewhere.
UNSUPERVISED = 76
#: An agent whose resource limits were lowered for good: its watchdog starts another one (EX_OSERR of sysexits.h).
LIMITED = 71
