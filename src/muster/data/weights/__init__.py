"""Pretrained weights: where their files come from."""
