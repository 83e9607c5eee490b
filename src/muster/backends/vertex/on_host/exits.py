"""What Vertex AI makes of a container's exit, and with what a host's first program may end. A table, no act.

Origin: Google's pages on the training service ("common errors", "restarts"; read 2026-11-22), and jobs of others: a
worker's exit 1 ended its whole job (vertex-ai-samples, pull request 1504).

=========  ==================  ========================================================================================
code       of whom             what follows
=========  ==================  ========================================================================================
0          the chief           the job SUCCEEDED; all other hosts are shut down, perhaps in the middle of a write
0          another host        not written: done, not started again, paid for until the job ends
6, 134     any                 (SIGABRT) the whole job is tried again, up to three times: every host anew, memory lost
11, 139    any                 (SIGSEGV) the same
137        any                 the kernel's kill for memory: all hosts are shut down, nothing is tried again
any other  any                 the job FAILED, code 3: all hosts are shut down; 75 ("saved, go on") means nothing here
=========  ==================  ========================================================================================
"""

from __future__ import annotations

from enum import StrEnum


class Effect(StrEnum):
    """What follows for the job."""

    SUCCEEDS = "the job succeeds, all other hosts are shut down"
    DONE = "this host is done, and paid for until the job ends"
    AGAIN = "the whole job is tried again, every host anew"
    FAILS = "the job fails, all hosts are shut down"


TRIED_AGAIN = frozenset({6, 11, 134, 139})


def effect(code: int, *, chief: bool) -> Effect:
    """Of a container that ends with ``code`` (of a signal: 128 and its number)."""
    if code == 0:
        return Effect.SUCCEEDS if chief else Effect.DONE
    return Effect.AGAIN if code in TRIED_AGAIN else Effect.FAILS


def exit_code(*, said: bool) -> int:
    """With what a host's first program ends once the run is over, whatever the run's end was.

    ``said``: the end is written in the run's home, which ``muster status`` reads; so the job's own state tells nothing
    and is a success. 1 where it could not be written: then a failed job is all that is left to be seen.
    """
    return 0 if said else 1


def may_end(*, over: bool, chief: bool, others: int) -> bool:
    """Whether a host's first program may end now. ``over``: the run has ended, or this job is not the one that counts;
    ``others``: hosts whose last write the chief still waits for, because its end is theirs."""
    return over and (others == 0 or not chief)
