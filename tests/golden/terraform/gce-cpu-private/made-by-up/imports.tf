# For what `muster up` made: copy this file to the others and leave queue.tf out, as Helm takes over no objects that it
# did not install. `terraform plan` then shows what would change, before anything does.

import {
  id = "projects/example-project/serviceAccounts/muster-hosts@example-project.iam.gserviceaccount.com"
  to = google_service_account.service_accounts["muster-hosts"]
}

import {
  id = "projects/example-project/serviceAccounts/muster-supervisor@example-project.iam.gserviceaccount.com"
  to = google_service_account.service_accounts["muster-supervisor"]
}

import {
  id = "projects/example-project/roles/musterSupervisor"
  to = google_project_iam_custom_role.roles["musterSupervisor"]
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
  id = "projects/example-project/global/firewalls/muster-net-internal"
  to = google_compute_firewall.firewalls["muster-net-internal"]
}

import {
  id = "example-project/example-bucket"
  to = google_storage_bucket.buckets["example-bucket"]
}
