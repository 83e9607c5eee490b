"""Where a run lives: stores with conditional writes, URIs, folders, the registry of runs."""
