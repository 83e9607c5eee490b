"""Device meshes, process groups, and every sum across ranks."""
