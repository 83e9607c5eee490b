"""What each kind of event says: one frozen class a kind, with the meaning and unit of every field."""
