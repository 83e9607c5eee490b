"""The run file: its keys, where its text comes from, and every check of it. No I/O beyond reading files."""
