"""Use cases that look at a run and change nothing."""
