"""A Hugging Face folder from a checkpoint, verified."""
