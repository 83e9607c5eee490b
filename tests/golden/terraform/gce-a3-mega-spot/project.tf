# Written by `muster render --format terraform` for runs on a3-megagpu-8g in us-central1.
# `muster submit` makes the machines. It was never applied: read `terraform plan`.

terraform {
  required_version = ">= 1.5"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 6.50"
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
    "cloudbilling.googleapis.com",
    "cloudresourcemanager.googleapis.com",
    "compute.googleapis.com",
    "iam.googleapis.com",
    "secretmanager.googleapis.com",
    "storage.googleapis.com",
  ])
  project            = "example-project"
  service            = each.value
  disable_on_destroy = false
}

resource "google_service_account" "muster_hosts" {
  account_id   = "muster-hosts"
  display_name = "hosts of Muster's runs"
  description  = "made by muster"
  depends_on   = [google_project_service.services]
}

resource "google_service_account" "muster_supervisor" {
  account_id   = "muster-supervisor"
  display_name = "supervisors of Muster's runs"
  description  = "made by muster"
  depends_on   = [google_project_service.services]
}

resource "google_project_iam_custom_role" "mustersupervisor" {
  role_id = "musterSupervisor"
  title   = "Muster supervisor"
  stage   = "GA"
  permissions = [
    "compute.disks.create",
    "compute.disks.delete",
    "compute.disks.list",
    "compute.disks.setLabels",
    "compute.images.useReadOnly",
    "compute.instanceGroupManagers.create",
    "compute.instanceGroupManagers.delete",
    "compute.instanceGroupManagers.get",
    "compute.instanceGroupManagers.list",
    "compute.instanceGroupManagers.update",
    "compute.instanceTemplates.create",
    "compute.instanceTemplates.delete",
    "compute.instanceTemplates.get",
    "compute.instanceTemplates.list",
    "compute.instanceTemplates.useReadOnly",
    "compute.instances.create",
    "compute.instances.delete",
    "compute.instances.get",
    "compute.instances.list",
    "compute.instances.setLabels",
    "compute.instances.setMetadata",
    "compute.instances.setServiceAccount",
    "compute.instances.setTags",
    "compute.reservations.get",
    "compute.reservations.list",
    "compute.resourcePolicies.create",
    "compute.resourcePolicies.delete",
    "compute.resourcePolicies.get",
    "compute.resourcePolicies.list",
    "compute.resourcePolicies.use",
    "compute.subnetworks.use",
    "compute.subnetworks.useExternalIp",
    "compute.zoneOperations.get",
    "compute.zoneOperations.list",
    "compute.regionOperations.get",
    "compute.globalOperations.get",
  ]
  depends_on = [google_project_service.services]
}

resource "google_project_iam_member" "grants_machines" {
  project = "example-project"
  role    = google_project_iam_custom_role.mustersupervisor.name
  member  = "serviceAccount:${google_service_account.muster_supervisor.email}"
}

resource "google_service_account_iam_member" "grants_acts_as_hosts" {
  service_account_id = google_service_account.muster_hosts.name
  role               = "roles/iam.serviceAccountUser"
  member             = "serviceAccount:${google_service_account.muster_supervisor.email}"
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
  ip_cidr_range            = "10.73.192.0/20"
  private_ip_google_access = true
  region                   = "us-central1"
  depends_on               = [google_project_service.services]
}

resource "google_compute_network" "muster_net_1" {
  name                    = "muster-net-1"
  description             = "made by muster"
  auto_create_subnetworks = false
  mtu                     = 8244
  routing_mode            = "REGIONAL"
  depends_on              = [google_project_service.services]
}

resource "google_compute_firewall" "muster_net_1_internal" {
  name          = "muster-net-1-internal"
  description   = "made by muster"
  network       = google_compute_network.muster_net_1.id
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

resource "google_compute_subnetwork" "muster_sub_1" {
  name          = "muster-sub-1"
  description   = "made by muster"
  network       = google_compute_network.muster_net_1.id
  ip_cidr_range = "192.168.0.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_network" "muster_net_2" {
  name                    = "muster-net-2"
  description             = "made by muster"
  auto_create_subnetworks = false
  mtu                     = 8244
  routing_mode            = "REGIONAL"
  depends_on              = [google_project_service.services]
}

resource "google_compute_firewall" "muster_net_2_internal" {
  name          = "muster-net-2-internal"
  description   = "made by muster"
  network       = google_compute_network.muster_net_2.id
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

resource "google_compute_subnetwork" "muster_sub_2" {
  name          = "muster-sub-2"
  description   = "made by muster"
  network       = google_compute_network.muster_net_2.id
  ip_cidr_range = "192.168.16.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_network" "muster_net_3" {
  name                    = "muster-net-3"
  description             = "made by muster"
  auto_create_subnetworks = false
  mtu                     = 8244
  routing_mode            = "REGIONAL"
  depends_on              = [google_project_service.services]
}

resource "google_compute_firewall" "muster_net_3_internal" {
  name          = "muster-net-3-internal"
  description   = "made by muster"
  network       = google_compute_network.muster_net_3.id
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

resource "google_compute_subnetwork" "muster_sub_3" {
  name          = "muster-sub-3"
  description   = "made by muster"
  network       = google_compute_network.muster_net_3.id
  ip_cidr_range = "192.168.32.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_network" "muster_net_4" {
  name                    = "muster-net-4"
  description             = "made by muster"
  auto_create_subnetworks = false
  mtu                     = 8244
  routing_mode            = "REGIONAL"
  depends_on              = [google_project_service.services]
}

resource "google_compute_firewall" "muster_net_4_internal" {
  name          = "muster-net-4-internal"
  description   = "made by muster"
  network       = google_compute_network.muster_net_4.id
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

resource "google_compute_subnetwork" "muster_sub_4" {
  name          = "muster-sub-4"
  description   = "made by muster"
  network       = google_compute_network.muster_net_4.id
  ip_cidr_range = "192.168.48.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_network" "muster_net_5" {
  name                    = "muster-net-5"
  description             = "made by muster"
  auto_create_subnetworks = false
  mtu                     = 8244
  routing_mode            = "REGIONAL"
  depends_on              = [google_project_service.services]
}

resource "google_compute_firewall" "muster_net_5_internal" {
  name          = "muster-net-5-internal"
  description   = "made by muster"
  network       = google_compute_network.muster_net_5.id
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

resource "google_compute_subnetwork" "muster_sub_5" {
  name          = "muster-sub-5"
  description   = "made by muster"
  network       = google_compute_network.muster_net_5.id
  ip_cidr_range = "192.168.64.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_network" "muster_net_6" {
  name                    = "muster-net-6"
  description             = "made by muster"
  auto_create_subnetworks = false
  mtu                     = 8244
  routing_mode            = "REGIONAL"
  depends_on              = [google_project_service.services]
}

resource "google_compute_firewall" "muster_net_6_internal" {
  name          = "muster-net-6-internal"
  description   = "made by muster"
  network       = google_compute_network.muster_net_6.id
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

resource "google_compute_subnetwork" "muster_sub_6" {
  name          = "muster-sub-6"
  description   = "made by muster"
  network       = google_compute_network.muster_net_6.id
  ip_cidr_range = "192.168.80.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_network" "muster_net_7" {
  name                    = "muster-net-7"
  description             = "made by muster"
  auto_create_subnetworks = false
  mtu                     = 8244
  routing_mode            = "REGIONAL"
  depends_on              = [google_project_service.services]
}

resource "google_compute_firewall" "muster_net_7_internal" {
  name          = "muster-net-7-internal"
  description   = "made by muster"
  network       = google_compute_network.muster_net_7.id
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

resource "google_compute_subnetwork" "muster_sub_7" {
  name          = "muster-sub-7"
  description   = "made by muster"
  network       = google_compute_network.muster_net_7.id
  ip_cidr_range = "192.168.96.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_network" "muster_net_8" {
  name                    = "muster-net-8"
  description             = "made by muster"
  auto_create_subnetworks = false
  mtu                     = 8244
  routing_mode            = "REGIONAL"
  depends_on              = [google_project_service.services]
}

resource "google_compute_firewall" "muster_net_8_internal" {
  name          = "muster-net-8-internal"
  description   = "made by muster"
  network       = google_compute_network.muster_net_8.id
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

resource "google_compute_subnetwork" "muster_sub_8" {
  name          = "muster-sub-8"
  description   = "made by muster"
  network       = google_compute_network.muster_net_8.id
  ip_cidr_range = "192.168.112.0/20"
  region        = "us-central1"
  depends_on    = [google_project_service.services]
}

resource "google_compute_firewall" "muster_net_internal" {
  name          = "muster-net-internal"
  description   = "made by muster"
  network       = google_compute_network.muster_net.id
  direction     = "INGRESS"
  source_ranges = ["10.64.0.0/12"]
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

resource "google_storage_bucket_iam_member" "grants_hosts_example_bucket" {
  bucket     = "example-bucket"
  role       = "roles/storage.objectUser"
  member     = "serviceAccount:${google_service_account.muster_hosts.email}"
  depends_on = [google_storage_bucket.example_bucket]
}

resource "google_storage_bucket_iam_member" "grants_supervisor_example_bucket" {
  bucket     = "example-bucket"
  role       = "roles/storage.objectUser"
  member     = "serviceAccount:${google_service_account.muster_supervisor.email}"
  depends_on = [google_storage_bucket.example_bucket]
}
