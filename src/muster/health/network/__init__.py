"""The network between hosts: which figures to expect, which pairs to measure next, and which host they name."""
