# Written by `muster render --format terraform` for a4-highgpu-8g in us-central1-b.
# `muster submit` uses what this makes. It was never applied: read `terraform plan`.
# Not here, and needed on the cluster once:
#   kubectl apply -f https://raw.githubusercontent.com/GoogleCloudPlatform/container-engine-accelerators/refs/heads/master/gpudirect-rdma/nccl-rdma-installer.yaml

terraform {
  required_version = ">= 1.5"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 6.50"
    }
    helm = {
      source  = "hashicorp/helm"
      version = "~> 3.0"
    }
  }
}

provider "google" {
  project = "example-project"
  region  = "us-central1"
}

data "google_project" "this" {
  project_id = "example-project"
}

resource "google_project_service" "services" {
  for_each = toset([
    "artifactregistry.googleapis.com",
    "cloudbilling.googleapis.com",
    "cloudbuild.googleapis.com",
    "cloudresourcemanager.googleapis.com",
    "compute.googleapis.com",
    "container.googleapis.com",
    "iam.googleapis.com",
    "storage.googleapis.com",
    "containerfilesystem.googleapis.com",
  ])
  project            = "example-project"
  service            = each.value
  disable_on_destroy = false
}

resource "google_service_account" "muster_nodes" {
  account_id   = "muster-nodes"
  display_name = "nodes of Muster's clusters"
  description  = "made by muster"
  depends_on   = [google_project_service.services]
}

resource "google_project_iam_member" "grants_nodes" {
  project = "example-project"
  role    = "roles/container.defaultNodeServiceAccount"
  member  = "serviceAccount:${google_service_account.muster_nodes.email}"
}

resource "google_service_account" "muster_build" {
  account_id   = "muster-build"
  display_name = "image builds of Muster"
  description  = "made by muster"
  depends_on   = [google_project_service.services]
}

resource "google_project_iam_member" "grants_build" {
  project = "example-project"
  role    = "roles/logging.logWriter"
  member  = "serviceAccount:${google_service_account.muster_build.email}"
}

resource "google_compute_network" "muster_net" {
  name                    = "muster-net"
  description             = "made by muster"
  auto_create_subnetworks = false
  routing_mode            = "REGIONAL"
  depends_on              = [google_project_service.services]
}

resource "google_compute_subnetwork" "muster_sub" {
  name                     = "muster-sub"
  description              = "made by muster"
  network                  = google_compute_network.muster_net.id
  ip_cidr_range            = "10.64.0.0/20"
  private_ip_google_access = true
  region                   = "us-central1"
  depends_on               = [google_project_service.services]
}

resource "google_compute_router" "muster_router" {
  name        = "muster-router"
  description = "made by muster"
  network     = google_compute_network.muster_net.id
  region      = "us-central1"
  depends_on  = [google_project_service.services, google_compute_subnetwork.muster_sub]
}

resource "google_compute_router_nat" "muster_nat" {
  name                                = "muster-nat"
  nat_ip_allocate_option              = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat  = "ALL_SUBNETWORKS_ALL_IP_RANGES"
  enable_dynamic_port_allocation      = true
  enable_endpoint_independent_mapping = false
  min_ports_per_vm                    = 64
  max_ports_per_vm                    = 8192
  router                              = google_compute_router.muster_router.name
  region                              = "us-central1"
}

resource "google_compute_network" "muster_gvnic_net" {
  name                    = "muster-gvnic-net"
  description             = "made by muster"
  auto_create_subnetworks = false
  mtu                     = 8896
  routing_mode            = "REGIONAL"
  depends_on              = [google_project_service.services]
}

resource "google_compute_firewall" "muster_gvnic_net_internal" {
  name          = "muster-gvnic-net-internal"
  description   = "made by muster"
  network       = google_compute_network.muster_gvnic_net.id
  direction     = "INGRESS"
  source_ranges = ["192.168.0.0/16"]
  depends_on    = [google_project_service.services]

  allow {
    protocol = "tcp"
    ports    = ["0-65535"]
  }

  allow {
    protocol = "udp"
    ports    = ["0-65535"]
  }

  allow {
    protocol = "icmp"
  }
}

resource "google_compute_subnetwork" "muster_gvnic_sub" {
  name          = "muster-gvnic-sub"
  description   = "made by muster"
  network       = google_compute_network.muster_gvnic_net.id
  ip_cidr_range = "192.168.0.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_network" "muster_rdma_net" {
  name                    = "muster-rdma-net"
  description             = "made by muster"
  auto_create_subnetworks = false
  network_profile         = "projects/example-project/global/networkProfiles/us-central1-b-vpc-roce"
  routing_mode            = "REGIONAL"
  depends_on              = [google_project_service.services]
}

resource "google_compute_subnetwork" "muster_rdma_sub_0" {
  name          = "muster-rdma-sub-0"
  description   = "made by muster"
  network       = google_compute_network.muster_rdma_net.id
  ip_cidr_range = "192.168.16.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_subnetwork" "muster_rdma_sub_1" {
  name          = "muster-rdma-sub-1"
  description   = "made by muster"
  network       = google_compute_network.muster_rdma_net.id
  ip_cidr_range = "192.168.32.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_subnetwork" "muster_rdma_sub_2" {
  name          = "muster-rdma-sub-2"
  description   = "made by muster"
  network       = google_compute_network.muster_rdma_net.id
  ip_cidr_range = "192.168.48.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_subnetwork" "muster_rdma_sub_3" {
  name          = "muster-rdma-sub-3"
  description   = "made by muster"
  network       = google_compute_network.muster_rdma_net.id
  ip_cidr_range = "192.168.64.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_subnetwork" "muster_rdma_sub_4" {
  name          = "muster-rdma-sub-4"
  description   = "made by muster"
  network       = google_compute_network.muster_rdma_net.id
  ip_cidr_range = "192.168.80.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_subnetwork" "muster_rdma_sub_5" {
  name          = "muster-rdma-sub-5"
  description   = "made by muster"
  network       = google_compute_network.muster_rdma_net.id
  ip_cidr_range = "192.168.96.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_subnetwork" "muster_rdma_sub_6" {
  name          = "muster-rdma-sub-6"
  description   = "made by muster"
  network       = google_compute_network.muster_rdma_net.id
  ip_cidr_range = "192.168.112.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_subnetwork" "muster_rdma_sub_7" {
  name          = "muster-rdma-sub-7"
  description   = "made by muster"
  network       = google_compute_network.muster_rdma_net.id
  ip_cidr_range = "192.168.128.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_artifact_registry_repository" "muster" {
  repository_id = "muster"
  location      = "us-central1"
  format        = "DOCKER"
  description   = "made by muster"
  labels = {
    managed-by = "muster"
  }
  depends_on = [google_project_service.services]
}

resource "google_storage_bucket" "example_bucket" {
  name     = "example-bucket"
  location = "US-CENTRAL1"
  labels = {
    managed-by = "muster"
  }
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  depends_on                  = [google_project_service.services]

  hierarchical_namespace {
    enabled = true
  }

  soft_delete_policy {
    retention_duration_seconds = 0
  }
}

resource "google_storage_bucket_iam_member" "bindings_example_bucket" {
  bucket     = "example-bucket"
  role       = "roles/storage.objectUser"
  member     = "principal://iam.googleapis.com/projects/${data.google_project.this.number}/locations/global/workloadIdentityPools/example-project.svc.id.goog/subject/ns/default/sa/muster"
  depends_on = [google_storage_bucket.example_bucket]
}

resource "google_artifact_registry_repository_iam_member" "grants_nodes_images" {
  project    = "example-project"
  location   = "us-central1"
  repository = "muster"
  role       = "roles/artifactregistry.reader"
  member     = "serviceAccount:${google_service_account.muster_nodes.email}"
  depends_on = [google_artifact_registry_repository.muster]
}

resource "google_artifact_registry_repository_iam_member" "grants_build_images" {
  project    = "example-project"
  location   = "us-central1"
  repository = "muster"
  role       = "roles/artifactregistry.writer"
  member     = "serviceAccount:${google_service_account.muster_build.email}"
  depends_on = [google_artifact_registry_repository.muster]
}

resource "google_storage_bucket_iam_member" "grants_build_files" {
  bucket     = "example-bucket"
  role       = "roles/storage.objectViewer"
  member     = "serviceAccount:${google_service_account.muster_build.email}"
  depends_on = [google_storage_bucket.example_bucket]
}

resource "google_container_cluster" "muster" {
  name        = "muster"
  description = "made by muster"
  resource_labels = {
    managed-by = "muster"
  }
  network                  = google_compute_network.muster_net.id
  subnetwork               = google_compute_subnetwork.muster_sub.id
  location                 = "us-central1"
  datapath_provider        = "ADVANCED_DATAPATH"
  enable_multi_networking  = true
  networking_mode          = "VPC_NATIVE"
  initial_node_count       = 1
  remove_default_node_pool = true
  deletion_protection      = false
  depends_on = [
    google_project_service.services,
    google_compute_router_nat.muster_nat,
    google_service_account.muster_nodes,
    google_project_iam_member.grants_nodes,
    google_artifact_registry_repository_iam_member.grants_nodes_images,
  ]

  ip_allocation_policy {}

  addons_config {
    gcs_fuse_csi_driver_config {
      enabled = true
    }
  }

  workload_identity_config {
    workload_pool = "example-project.svc.id.goog"
  }

  release_channel {
    channel = "REGULAR"
  }

  private_cluster_config {
    enable_private_nodes    = true
    enable_private_endpoint = false
  }

  master_authorized_networks_config {
    gcp_public_cidrs_access_enabled = false

    cidr_blocks {
      cidr_block   = "203.0.113.7/32"
      display_name = "muster"
    }
  }

  lifecycle {
    ignore_changes = [initial_node_count, maintenance_policy, node_config, node_pool, remove_default_node_pool]
  }
}

resource "google_container_node_pool" "muster_cpu" {
  name               = "muster-cpu"
  cluster            = google_container_cluster.muster.name
  location           = "us-central1"
  initial_node_count = 1
  node_locations     = ["us-central1-b"]

  autoscaling {
    total_min_node_count = 1
    total_max_node_count = 8
    location_policy      = "BALANCED"
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  node_config {
    machine_type    = "e2-standard-4"
    service_account = google_service_account.muster_nodes.email
    disk_type       = "pd-balanced"
    disk_size_gb    = 100
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    resource_labels = {
      managed-by = "muster"
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }

  network_config {
    enable_private_nodes = true
  }

  lifecycle {
    ignore_changes = [initial_node_count]
  }
}

resource "google_container_node_pool" "muster_b200_flex_start_queued" {
  name               = "muster-b200-flex-start-queued"
  cluster            = google_container_cluster.muster.name
  location           = "us-central1"
  node_locations     = ["us-central1-b"]
  initial_node_count = 0

  management {
    auto_repair  = false
    auto_upgrade = true
  }

  node_config {
    machine_type    = "a4-highgpu-8g"
    disk_type       = "hyperdisk-balanced"
    disk_size_gb    = 200
    service_account = google_service_account.muster_nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    resource_labels = {
      managed-by = "muster"
    }
    flex_start       = true
    max_run_duration = "604800s"
    labels = {
      "cloud.google.com/gke-queued" = "true"
    }

    guest_accelerator {
      type  = "nvidia-b200"
      count = 8

      gpu_driver_installation_config {
        gpu_driver_version = "LATEST"
      }
    }

    gvnic {
      enabled = true
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }

    ephemeral_storage_local_ssd_config {
      local_ssd_count = 32
    }

    gcfs_config {
      enabled = true
    }

    reservation_affinity {
      consume_reservation_type = "NO_RESERVATION"
    }
  }

  queued_provisioning {
    enabled = true
  }

  autoscaling {
    total_min_node_count = 0
    total_max_node_count = 2
    location_policy      = "ANY"
  }

  network_config {
    enable_private_nodes = true

    additional_node_network_configs {
      network    = google_compute_network.muster_gvnic_net.name
      subnetwork = google_compute_subnetwork.muster_gvnic_sub.name
    }

    additional_node_network_configs {
      network    = google_compute_network.muster_rdma_net.name
      subnetwork = google_compute_subnetwork.muster_rdma_sub_0.name
    }

    additional_node_network_configs {
      network    = google_compute_network.muster_rdma_net.name
      subnetwork = google_compute_subnetwork.muster_rdma_sub_1.name
    }

    additional_node_network_configs {
      network    = google_compute_network.muster_rdma_net.name
      subnetwork = google_compute_subnetwork.muster_rdma_sub_2.name
    }

    additional_node_network_configs {
      network    = google_compute_network.muster_rdma_net.name
      subnetwork = google_compute_subnetwork.muster_rdma_sub_3.name
    }

    additional_node_network_configs {
      network    = google_compute_network.muster_rdma_net.name
      subnetwork = google_compute_subnetwork.muster_rdma_sub_4.name
    }

    additional_node_network_configs {
      network    = google_compute_network.muster_rdma_net.name
      subnetwork = google_compute_subnetwork.muster_rdma_sub_5.name
    }

    additional_node_network_configs {
      network    = google_compute_network.muster_rdma_net.name
      subnetwork = google_compute_subnetwork.muster_rdma_sub_6.name
    }

    additional_node_network_configs {
      network    = google_compute_network.muster_rdma_net.name
      subnetwork = google_compute_subnetwork.muster_rdma_sub_7.name
    }
  }

  lifecycle {
    ignore_changes = [initial_node_count]
  }
}
