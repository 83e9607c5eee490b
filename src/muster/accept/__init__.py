"""Acceptance: does a place really work, by a ladder from nothing to two hosts, within a budget (``muster accept``)."""
