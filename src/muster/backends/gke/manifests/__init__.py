"""What is sent to a cluster, rendered from a run file. Pure."""
