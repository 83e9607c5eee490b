"""Host time by category: a pure fold over the event log."""
