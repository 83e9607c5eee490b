"""Sweeps: many runs of one run file, each with other values of a few of its keys."""
