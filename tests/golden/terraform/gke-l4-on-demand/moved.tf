# For a state of what Muster rendered until November 2026: each resource gets its address of now and stays as it is.

moved {
  from = google_service_account.muster_nodes
  to   = google_service_account.service_accounts["muster-nodes"]
}

moved {
  from = google_project_iam_member.grants_nodes
  to   = google_project_iam_member.project_grants["grants/nodes"]
}

moved {
  from = google_service_account.muster_build
  to   = google_service_account.service_accounts["muster-build"]
}

moved {
  from = google_project_iam_member.grants_build
  to   = google_project_iam_member.project_grants["grants/build"]
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
  from = google_artifact_registry_repository.muster
  to   = google_artifact_registry_repository.repositories["muster"]
}

moved {
  from = google_storage_bucket.example_bucket
  to   = google_storage_bucket.buckets["example-bucket"]
}

moved {
  from = google_storage_bucket_iam_member.bindings_example_bucket
  to   = google_storage_bucket_iam_member.bucket_grants["bindings/example-bucket"]
}

moved {
  from = google_artifact_registry_repository_iam_member.grants_nodes_images
  to   = google_artifact_registry_repository_iam_member.repository_grants["grants/nodes-images"]
}

moved {
  from = google_artifact_registry_repository_iam_member.grants_build_images
  to   = google_artifact_registry_repository_iam_member.repository_grants["grants/build-images"]
}

moved {
  from = google_storage_bucket_iam_member.grants_build_files
  to   = google_storage_bucket_iam_member.bucket_grants["grants/build-files"]
}

moved {
  from = google_container_cluster.muster
  to   = google_container_cluster.clusters["muster"]
}

moved {
  from = google_container_node_pool.muster_cpu
  to   = google_container_node_pool.node_pools["muster-cpu"]
}

moved {
  from = google_container_node_pool.muster_l4_on_demand
  to   = google_container_node_pool.node_pools["muster-l4-on-demand"]
}
