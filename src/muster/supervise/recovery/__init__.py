"""The recovery state machine. Pure: inputs and a time in, effects out."""
