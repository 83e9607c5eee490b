"""Use cases before a run: plan, prices, calibration, rehearsal."""
