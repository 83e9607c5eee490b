"""The supervisor as a process: sockets, the lease, clocks, signals, limits."""
