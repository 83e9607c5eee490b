"""Faults injected on purpose: the catalogue, what each does to a run, and how processes and networks are broken."""
