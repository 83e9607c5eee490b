"""Use cases about the place that runs jobs: create and remove a cluster, images, manifests."""
