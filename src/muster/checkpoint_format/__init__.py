"""Checkpoints and in-memory snapshots as bytes: manifests, indexes, shards, checksums, fences. No torch."""
