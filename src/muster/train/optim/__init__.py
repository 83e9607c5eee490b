"""Optimizers, learning rate, and the guard against updates that are not finite."""
