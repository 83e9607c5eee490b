"""Held-out loss, generated answers and samples."""
