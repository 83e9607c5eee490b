"""Pure judgement: from what went wrong to what to do about it. No clock, no I/O, no back-end names."""
