"""Micro-batches on their device, built ahead of the step that needs them."""
