"""Sections of the run file, as values."""
