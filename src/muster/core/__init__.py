"""Values, events, errors and seams. This floor imports nothing of ours and never torch."""
