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
  to = google_compute_network.muster_net_1
  id = "projects/example-project/global/networks/muster-net-1"
}

import {
  to = google_compute_firewall.muster_net_1_internal
  id = "projects/example-project/global/firewalls/muster-net-1-internal"
}

import {
  to = google_compute_subnetwork.muster_sub_1
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-1"
}

import {
  to = google_compute_network.muster_net_2
  id = "projects/example-project/global/networks/muster-net-2"
}

import {
  to = google_compute_firewall.muster_net_2_internal
  id = "projects/example-project/global/firewalls/muster-net-2-internal"
}

import {
  to = google_compute_subnetwork.muster_sub_2
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-2"
}

import {
  to = google_compute_network.muster_net_3
  id = "projects/example-project/global/networks/muster-net-3"
}

import {
  to = google_compute_firewall.muster_net_3_internal
  id = "projects/example-project/global/firewalls/muster-net-3-internal"
}

import {
  to = google_compute_subnetwork.muster_sub_3
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-3"
}

import {
  to = google_compute_network.muster_net_4
  id = "projects/example-project/global/networks/muster-net-4"
}

import {
  to = google_compute_firewall.muster_net_4_internal
  id = "projects/example-project/global/firewalls/muster-net-4-internal"
}

import {
  to = google_compute_subnetwork.muster_sub_4
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-4"
}

import {
  to = google_compute_network.muster_net_5
  id = "projects/example-project/global/networks/muster-net-5"
}

import {
  to = google_compute_firewall.muster_net_5_internal
  id = "projects/example-project/global/firewalls/muster-net-5-internal"
}

import {
  to = google_compute_subnetwork.muster_sub_5
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-5"
}

import {
  to = google_compute_network.muster_net_6
  id = "projects/example-project/global/networks/muster-net-6"
}

import {
  to = google_compute_firewall.muster_net_6_internal
  id = "projects/example-project/global/firewalls/muster-net-6-internal"
}

import {
  to = google_compute_subnetwork.muster_sub_6
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-6"
}

import {
  to = google_compute_network.muster_net_7
  id = "projects/example-project/global/networks/muster-net-7"
}

import {
  to = google_compute_firewall.muster_net_7_internal
  id = "projects/example-project/global/firewalls/muster-net-7-internal"
}

import {
  to = google_compute_subnetwork.muster_sub_7
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-7"
}

import {
  to = google_compute_network.muster_net_8
  id = "projects/example-project/global/networks/muster-net-8"
}

import {
  to = google_compute_firewall.muster_net_8_internal
  id = "projects/example-project/global/firewalls/muster-net-8-internal"
}

import {
  to = google_compute_subnetwork.muster_sub_8
  id = "projects/example-project/regions/us-central1/subnetworks/muster-sub-8"
}

import {
  to = google_compute_firewall.muster_net_internal
  id = "projects/example-project/global/firewalls/muster-net-internal"
}

import {
  to = google_storage_bucket.example_bucket
  id = "example-project/example-bucket"
}
