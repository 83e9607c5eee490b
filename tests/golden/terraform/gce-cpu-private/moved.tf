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
  from = google_compute_router.muster_router
  to   = google_compute_router.routers["muster-router"]
}

moved {
  from = google_compute_router_nat.muster_nat
  to   = google_compute_router_nat.nats["muster-router"]
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
