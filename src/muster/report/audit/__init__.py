"""Whether a recorded run kept its invariants; shares no code with what recorded it."""
