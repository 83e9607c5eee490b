# For what `muster up` made: copy this file beside project.tf. `terraform plan` then shows what would change.

import {
  to = google_service_account.muster_hosts
  id = "projects/example-project/serviceAccounts/muster-hosts@example-project.iam.gserviceaccount.com"
}

import {
  to = google_service_account.muster_supervisor
  id = "projects/example-project/serviceAccounts/muster-supervisor@example-project.iam.gserviceaccount.com"
}

import {
  to = google_project_iam_custom_role.mustersupervisor
  id = "projects/example-project/roles/musterSupervisor"
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
  to = google_compute_firewall.muster_net_internal
  id = "projects/example-project/global/firewalls/muster-net-internal"
}

import {
  to = google_storage_bucket.example_bucket
  id = "example-project/example-bucket"
}
