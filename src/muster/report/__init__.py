"""What a finished or running run cost and achieved, read from its events alone."""
