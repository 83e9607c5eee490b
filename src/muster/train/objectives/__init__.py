"""Objectives on preferences: each a function of the documents' log-probabilities."""
