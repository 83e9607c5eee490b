"""What ``first_gpu_hour.py`` runs: probes of one machine, each in a process of its own."""
