"""What an agent knows, what happens to it, and what it does: plain values."""
