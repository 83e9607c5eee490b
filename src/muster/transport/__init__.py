"""Authenticated connections between processes of a run."""
