"""Why a run hangs: captures of one moment read as values, and the rank that the others wait for."""
