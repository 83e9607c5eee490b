"""Rows to tokens to sequences."""
