"""What is decided about the programs of a host: fork server, replicator, setup, data preparation, trackers."""
