"""A run that stands still: what its hosts captured, and who is named for it."""
