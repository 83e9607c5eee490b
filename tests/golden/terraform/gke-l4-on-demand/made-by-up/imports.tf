# For what `muster up` made: copy this file to the others and leave queue.tf out, as Helm takes over no objects that it
# did not install. `terraform plan` then shows what would change, before anything does.

import {
  id = "projects/example-project/serviceAccounts/muster-nodes@example-project.iam.gserviceaccount.com"
  to = google_service_account.service_accounts["muster-nodes"]
}

import {
  id = "projects/example-project/serviceAccounts/muster-build@example-project.iam.gserviceaccount.com"
  to = google_service_account.service_accounts["muster-build"]
}

import {
  id = "projects/example-project/global/networks/muster-net"
  to = google_compute_network.networks["muster-net"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub"
  to = google_compute_subnetwork.subnetworks["muster-sub"]
}

import {
  id = "projects/example-project/locations/us-central1/repositories/muster"
  to = google_artifact_registry_repository.repositories["muster"]
}

import {
  id = "example-project/example-bucket"
  to = google_storage_bucket.buckets["example-bucket"]
}

import {
  id = "projects/example-project/locations/us-central1/clusters/muster"
  to = google_container_cluster.clusters["muster"]
}

import {
  id = "example-project/us-central1/muster/muster-cpu"
  to = google_container_node_pool.node_pools["muster-cpu"]
}

import {
  id = "example-project/us-central1/muster/muster-l4-on-demand"
  to = google_container_node_pool.node_pools["muster-l4-on-demand"]
}
