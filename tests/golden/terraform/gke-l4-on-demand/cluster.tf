# Written by `muster render --format terraform` for g2-standard-48 in us-central1-b.
# `muster submit` uses what this makes. It was never applied: read `terraform plan`.

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

  lifecycle {
    ignore_changes = [initial_node_count]
  }
}

resource "google_container_node_pool" "muster_l4_on_demand" {
  name               = "muster-l4-on-demand"
  cluster            = google_container_cluster.muster.name
  location           = "us-central1"
  node_locations     = ["us-central1-b"]
  initial_node_count = 0

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  node_config {
    machine_type    = "g2-standard-48"
    disk_type       = "pd-balanced"
    disk_size_gb    = 400
    service_account = google_service_account.muster_nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    resource_labels = {
      managed-by = "muster"
    }

    guest_accelerator {
      type  = "nvidia-l4"
      count = 4

      gpu_driver_installation_config {
        gpu_driver_version = "DEFAULT"
      }
    }

    gvnic {
      enabled = true
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }

    gcfs_config {
      enabled = true
    }

    reservation_affinity {
      consume_reservation_type = "NO_RESERVATION"
    }
  }

  autoscaling {
    total_min_node_count = 0
    total_max_node_count = 2
    location_policy      = "BALANCED"
  }

  lifecycle {
    ignore_changes = [initial_node_count]
  }
}
