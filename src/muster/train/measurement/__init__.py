"""What a rank reports of itself: the numbers of a step, traces and memory."""
