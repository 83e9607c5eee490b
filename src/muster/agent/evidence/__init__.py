"""What the ranks of a host do when a run hangs, captured before they are ended."""
