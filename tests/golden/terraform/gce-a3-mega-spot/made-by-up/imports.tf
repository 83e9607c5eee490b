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
  id = "projects/example-project/global/networks/muster-net-1"
  to = google_compute_network.networks["muster-net-1"]
}

import {
  id = "projects/example-project/global/firewalls/muster-net-1-internal"
  to = google_compute_firewall.firewalls["muster-net-1-internal"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-1"
  to = google_compute_subnetwork.subnetworks["muster-sub-1"]
}

import {
  id = "projects/example-project/global/networks/muster-net-2"
  to = google_compute_network.networks["muster-net-2"]
}

import {
  id = "projects/example-project/global/firewalls/muster-net-2-internal"
  to = google_compute_firewall.firewalls["muster-net-2-internal"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-2"
  to = google_compute_subnetwork.subnetworks["muster-sub-2"]
}

import {
  id = "projects/example-project/global/networks/muster-net-3"
  to = google_compute_network.networks["muster-net-3"]
}

import {
  id = "projects/example-project/global/firewalls/muster-net-3-internal"
  to = google_compute_firewall.firewalls["muster-net-3-internal"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-3"
  to = google_compute_subnetwork.subnetworks["muster-sub-3"]
}

import {
  id = "projects/example-project/global/networks/muster-net-4"
  to = google_compute_network.networks["muster-net-4"]
}

import {
  id = "projects/example-project/global/firewalls/muster-net-4-internal"
  to = google_compute_firewall.firewalls["muster-net-4-internal"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-4"
  to = google_compute_subnetwork.subnetworks["muster-sub-4"]
}

import {
  id = "projects/example-project/global/networks/muster-net-5"
  to = google_compute_network.networks["muster-net-5"]
}

import {
  id = "projects/example-project/global/firewalls/muster-net-5-internal"
  to = google_compute_firewall.firewalls["muster-net-5-internal"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-5"
  to = google_compute_subnetwork.subnetworks["muster-sub-5"]
}

import {
  id = "projects/example-project/global/networks/muster-net-6"
  to = google_compute_network.networks["muster-net-6"]
}

import {
  id = "projects/example-project/global/firewalls/muster-net-6-internal"
  to = google_compute_firewall.firewalls["muster-net-6-internal"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-6"
  to = google_compute_subnetwork.subnetworks["muster-sub-6"]
}

import {
  id = "projects/example-project/global/networks/muster-net-7"
  to = google_compute_network.networks["muster-net-7"]
}

import {
  id = "projects/example-project/global/firewalls/muster-net-7-internal"
  to = google_compute_firewall.firewalls["muster-net-7-internal"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-7"
  to = google_compute_subnetwork.subnetworks["muster-sub-7"]
}

import {
  id = "projects/example-project/global/networks/muster-net-8"
  to = google_compute_network.networks["muster-net-8"]
}

import {
  id = "projects/example-project/global/firewalls/muster-net-8-internal"
  to = google_compute_firewall.firewalls["muster-net-8-internal"]
}

import {
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-8"
  to = google_compute_subnetwork.subnetworks["muster-sub-8"]
}

import {
  id = "projects/example-project/global/firewalls/muster-net-internal"
  to = google_compute_firewall.firewalls["muster-net-internal"]
}

import {
  id = "example-project/example-bucket"
  to = google_storage_bucket.buckets["example-bucket"]
}
