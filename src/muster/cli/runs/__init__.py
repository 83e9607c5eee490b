"""What is drawn of runs, and the commands about several of them."""
