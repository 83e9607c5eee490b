"""A host looked at by the probe: what it saw (``report``), and what follows (``judge``, ``fleet``). No torch."""
