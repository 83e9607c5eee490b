"""What a rank tells of itself: the numbers of a step, traces and memory, trackers."""
