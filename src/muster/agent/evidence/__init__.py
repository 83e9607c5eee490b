"""What the ranks of a host do when a run stands still, captured before they are ended."""
