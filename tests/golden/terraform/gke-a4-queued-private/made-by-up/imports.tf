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
  id = "projects/example-project/regions/us-central1/routers/muster-router"
  to = google_compute_router.routers["muster-router"]
}

import {
  id = "projects/example-project/regions/us-central1/routers/muster-router/muster-nat"
  to = google_compute_router_nat.nats["muster-router"]
}

import {
  id = "projects/example-project/global/networks/muster-gvnic-net"
  to = google_compute_network.networks["muster-gvnic-net"]
}

import {
  id = "projects/example-project/global/firewalls/muster-gvnic-net-internal"
  to = google_compute_firewall.firewalls["muster-gvnic-net-internal"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-gvnic-sub"
  to = google_compute_subnetwork.subnetworks["muster-gvnic-sub"]
}

import {
  id = "projects/example-project/global/networks/muster-rdma-net"
  to = google_compute_network.networks["muster-rdma-net"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-0"
  to = google_compute_subnetwork.subnetworks["muster-rdma-sub-0"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-1"
  to = google_compute_subnetwork.subnetworks["muster-rdma-sub-1"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-2"
  to = google_compute_subnetwork.subnetworks["muster-rdma-sub-2"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-3"
  to = google_compute_subnetwork.subnetworks["muster-rdma-sub-3"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-4"
  to = google_compute_subnetwork.subnetworks["muster-rdma-sub-4"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-5"
  to = google_compute_subnetwork.subnetworks["muster-rdma-sub-5"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-6"
  to = google_compute_subnetwork.subnetworks["muster-rdma-sub-6"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-7"
  to = google_compute_subnetwork.subnetworks["muster-rdma-sub-7"]
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
  id = "example-project/us-central1/muster/muster-b200-flex-start-queued"
  to = google_container_node_pool.node_pools["muster-b200-flex-start-queued"]
}
