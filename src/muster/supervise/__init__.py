"""The loop that acts: fold what happened, judge it, act, again. Knows no back end and no torch."""
