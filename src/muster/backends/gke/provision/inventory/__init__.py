"""What a run file needs in a project: the names, the shape that all of it has, and each kind of thing."""
