"""The program of every host: it keeps the agent and, where it is due, the run's supervisor, until the run is over."""
