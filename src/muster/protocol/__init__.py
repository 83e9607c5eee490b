"""What processes of a run say to each other, as values."""
