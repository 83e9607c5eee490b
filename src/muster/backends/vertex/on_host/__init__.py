"""What a host of a custom job does, in parts; ``muster.backends.vertex.host`` puts them together."""
