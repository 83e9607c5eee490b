"""Data files: where they are, and their rows."""
