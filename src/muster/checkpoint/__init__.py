"""Training state on disk and in buckets: saved sharded and in the background, verified, restored to any layout."""
