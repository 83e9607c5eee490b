"""What becomes of a trained model elsewhere: its card, the hub, a place that serves it."""
