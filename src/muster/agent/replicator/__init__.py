"""Snapshots of one host on their way to peers' memory, the disk and the bucket."""
