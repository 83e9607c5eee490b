"""Hosts that look at their own hardware: what follows from what they saw (``judging``), and clients who ask."""
