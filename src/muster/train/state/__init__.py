"""Training state: hashed, kept in memory, saved, restored."""
