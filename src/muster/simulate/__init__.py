"""A virtual clock and virtual hosts that drive the real supervisor and policy, unchanged."""
