"""From a run's event files back to the state of its supervisor."""
