"""The trainer on TPUs: JAX computes the steps; data, snapshots, checkpoints and events are the torch trainer's."""
