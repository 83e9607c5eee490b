"""What a project has to hold before the first run on plain machines: ``muster up`` and ``muster down RUN.yaml``."""
