"""What owns descriptors, processes, threads and files of an agent: it yields events and carries out actions."""
