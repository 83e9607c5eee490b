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
  to = google_compute_router.muster_router
  id = "projects/example-project/regions/us-central1/routers/muster-router"
}

import {
  to = google_compute_router_nat.muster_nat
  id = "projects/example-project/regions/us-central1/routers/muster-router/muster-nat"
}

import {
  to = google_compute_network.muster_gvnic_net
  id = "projects/example-project/global/networks/muster-gvnic-net"
}

import {
  to = google_compute_firewall.muster_gvnic_net_internal
  id = "projects/example-project/global/firewalls/muster-gvnic-net-internal"
}

import {
  to = google_compute_subnetwork.muster_gvnic_sub
  id = "projects/example-project/regions/us-central1/subnetworks/muster-gvnic-sub"
}

import {
  to = google_compute_network.muster_rdma_net
  id = "projects/example-project/global/networks/muster-rdma-net"
}

import {
  to = google_compute_subnetwork.muster_rdma_sub_0
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-0"
}

import {
  to = google_compute_subnetwork.muster_rdma_sub_1
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-1"
}

import {
  to = google_compute_subnetwork.muster_rdma_sub_2
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-2"
}

import {
  to = google_compute_subnetwork.muster_rdma_sub_3
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-3"
}

import {
  to = google_compute_subnetwork.muster_rdma_sub_4
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-4"
}

import {
  to = google_compute_subnetwork.muster_rdma_sub_5
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-5"
}

import {
  to = google_compute_subnetwork.muster_rdma_sub_6
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-6"
}

import {
  to = google_compute_subnetwork.muster_rdma_sub_7
  id = "projects/example-project/regions/us-central1/subnetworks/muster-rdma-sub-7"
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
  to = google_container_node_pool.muster_b200_flex_start_queued
  id = "example-project/us-central1/muster/muster-b200-flex-start-queued"
}
