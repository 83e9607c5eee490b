"""Tasks: rows to train on, held-out questions, scores. The seam they implement is `muster.data.task`."""
