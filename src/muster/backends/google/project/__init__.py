"""What a project is made to hold before a run: resources that are looked at, made in order, and removed."""
