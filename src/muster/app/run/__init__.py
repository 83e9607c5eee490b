"""Use cases that start, change or end a run."""
