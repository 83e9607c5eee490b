# For what `muster up` made: copy this file beside cluster.tf and leave queue.tf out, as Helm takes over no objects that
# it did not install. `terraform plan` then shows what would change, before anything does.

import {
  to = google_service_account.muster_nodes
  id = "projects/example-project/serviceAccounts/muster-nodes@example-project.iam.gserviceaccount.com"
}

import {
  to = google_service_account.muster_build
  id = "projects/example-project/serviceAccounts/muster-build@example-project.iam.gserviceaccount.com"
}

import {
  to = google_compute_network.muster_net
  id = "projects/example-project/global/networks/muster-net"
}

import {
  to = google_compute_subnetwork.muster_sub
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub"
}

import {
  to = google_artifact_registry_repository.muster
  id = "projects/example-project/locations/us-central1/repositories/muster"
}

import {
  to = google_storage_bucket.example_bucket
  id = "example-project/example-bucket"
}

import {
  to = google_container_cluster.muster
  id = "projects/example-project/locations/us-central1/clusters/muster"
}

import {
  to = google_container_node_pool.muster_cpu
  id = "example-project/us-central1/muster/muster-cpu"
}

import {
  to = google_container_node_pool.muster_l4_on_demand
  id = "example-project/us-central1/muster/muster-l4-on-demand"
}
