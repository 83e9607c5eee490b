"""From an empty project to a cluster with GPUs, and back: every resource says what it is, whether it is there, whether
it differs. Names are fixed by the run file, so an interrupted ``up`` is resumed by running it again."""
