"""A run on a cluster after it was sent: where it is and why, logs, commands in its pods."""
