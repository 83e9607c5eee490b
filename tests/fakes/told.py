"""A shell for tests of what is said to one."""

from muster.core.protocols import Completed


class Told:
    """A shell that only remembers; ``fails``: what it cannot do."""

    def __init__(self, fails=()):
        self.said, self.fails = [], fails

    def run(self, argv, **_):
        self.said.append(" ".join(argv))
        failed = any(word in self.said[-1] for word in self.fails)
        return Completed(argv=tuple(argv), returncode=int(failed), stdout="", stderr="not permitted" if failed else "")
