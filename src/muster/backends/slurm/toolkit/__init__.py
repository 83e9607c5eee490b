"""A Cluster Toolkit blueprint of a cluster in Google Cloud that runs our jobs."""
