"""Of a trial (``muster accept``) what knows nothing of jobs: what is allowed, and what a node sees."""
