"""Use cases: one module per verb, over the seams. They return values; only ``cli`` prints and exits."""
