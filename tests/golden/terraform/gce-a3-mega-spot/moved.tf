# For a state of what Muster rendered until November 2026: each resource gets its address of now and stays as it is.

moved {
  from = google_service_account.muster_hosts
  to   = google_service_account.service_accounts["muster-hosts"]
}

moved {
  from = google_service_account.muster_supervisor
  to   = google_service_account.service_accounts["muster-supervisor"]
}

moved {
  from = google_project_iam_custom_role.mustersupervisor
  to   = google_project_iam_custom_role.roles["musterSupervisor"]
}

moved {
  from = google_project_iam_member.grants_machines
  to   = google_project_iam_member.project_grants["grants/machines"]
}

moved {
  from = google_service_account_iam_member.grants_acts_as_hosts
  to   = google_service_account_iam_member.account_grants["grants/acts-as-hosts"]
}

moved {
  from = google_compute_network.muster_net
  to   = google_compute_network.networks["muster-net"]
}

moved {
  from = google_compute_subnetwork.muster_sub
  to   = google_compute_subnetwork.subnetworks["muster-sub"]
}

moved {
  from = google_compute_network.muster_net_1
  to   = google_compute_network.networks["muster-net-1"]
}

moved {
  from = google_compute_firewall.muster_net_1_internal
  to   = google_compute_firewall.firewalls["muster-net-1-internal"]
}

moved {
  from = google_compute_subnetwork.muster_sub_1
  to   = google_compute_subnetwork.subnetworks["muster-sub-1"]
}

moved {
  from = google_compute_network.muster_net_2
  to   = google_compute_network.networks["muster-net-2"]
}

moved {
  from = google_compute_firewall.muster_net_2_internal
  to   = google_compute_firewall.firewalls["muster-net-2-internal"]
}

moved {
  from = google_compute_subnetwork.muster_sub_2
  to   = google_compute_subnetwork.subnetworks["muster-sub-2"]
}

moved {
  from = google_compute_network.muster_net_3
  to   = google_compute_network.networks["muster-net-3"]
}

moved {
  from = google_compute_firewall.muster_net_3_internal
  to   = google_compute_firewall.firewalls["muster-net-3-internal"]
}

moved {
  from = google_compute_subnetwork.muster_sub_3
  to   = google_compute_subnetwork.subnetworks["muster-sub-3"]
}

moved {
  from = google_compute_network.muster_net_4
  to   = google_compute_network.networks["muster-net-4"]
}

moved {
  from = google_compute_firewall.muster_net_4_internal
  to   = google_compute_firewall.firewalls["muster-net-4-internal"]
}

moved {
  from = google_compute_subnetwork.muster_sub_4
  to   = google_compute_subnetwork.subnetworks["muster-sub-4"]
}

moved {
  from = google_compute_network.muster_net_5
  to   = google_compute_network.networks["muster-net-5"]
}

moved {
  from = google_compute_firewall.muster_net_5_internal
  to   = google_compute_firewall.firewalls["muster-net-5-internal"]
}

moved {
  from = google_compute_subnetwork.muster_sub_5
  to   = google_compute_subnetwork.subnetworks["muster-sub-5"]
}

moved {
  from = google_compute_network.muster_net_6
  to   = google_compute_network.networks["muster-net-6"]
}

moved {
  from = google_compute_firewall.muster_net_6_internal
  to   = google_compute_firewall.firewalls["muster-net-6-internal"]
}

moved {
  from = google_compute_subnetwork.muster_sub_6
  to   = google_compute_subnetwork.subnetworks["muster-sub-6"]
}

moved {
  from = google_compute_network.muster_net_7
  to   = google_compute_network.networks["muster-net-7"]
}

moved {
  from = google_compute_firewall.muster_net_7_internal
  to   = google_compute_firewall.firewalls["muster-net-7-internal"]
}

moved {
  from = google_compute_subnetwork.muster_sub_7
  to   = google_compute_subnetwork.subnetworks["muster-sub-7"]
}

moved {
  from = google_compute_network.muster_net_8
  to   = google_compute_network.networks["muster-net-8"]
}

moved {
  from = google_compute_firewall.muster_net_8_internal
  to   = google_compute_firewall.firewalls["muster-net-8-internal"]
}

moved {
  from = google_compute_subnetwork.muster_sub_8
  to   = google_compute_subnetwork.subnetworks["muster-sub-8"]
}

moved {
  from = google_compute_firewall.muster_net_internal
  to   = google_compute_firewall.firewalls["muster-net-internal"]
}

moved {
  from = google_storage_bucket.example_bucket
  to   = google_storage_bucket.buckets["example-bucket"]
}

moved {
  from = google_storage_bucket_iam_member.grants_hosts_example_bucket
  to   = google_storage_bucket_iam_member.bucket_grants["grants/hosts-example-bucket"]
}

moved {
  from = google_storage_bucket_iam_member.grants_supervisor_example_bucket
  to   = google_storage_bucket_iam_member.bucket_grants["grants/supervisor-example-bucket"]
}
