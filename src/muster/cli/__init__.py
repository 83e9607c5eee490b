"""Parse, call one use case, print. The only floor that exits."""
