"""As ``backends.letters``; a host of a custom job is named by its number."""

from muster.backends.letters import ANSWER_S, ASK, RUN, Command, Letters, Outcome, box_of

__all__ = ["ANSWER_S", "ASK", "RUN", "Command", "Letters", "Outcome", "box_of"]
