# What runs find in a project: services, accounts with their roles, networks, buckets, images.
# The values are in terraform.tfvars.json; names of their fields are those of Google's API, in snake case.

provider "google" {
  project = var.project
  region  = var.region
}

data "google_project" "this" {
  project_id = var.project
}

locals {
  mark   = "made by muster"
  labels = { managed-by = "muster" }

  # Resources of this configuration by the name that requests have for them; what is not here was made elsewhere.
  network_ids  = { for name, one in google_compute_network.networks : name => one.id }
  email_names  = { for name, one in var.service_accounts : one.email => name }
  member_names = { for name, one in var.service_accounts : "serviceAccount:${one.email}" => name }
  role_names   = { for name, one in google_project_iam_custom_role.roles : "projects/${var.project}/roles/${name}" => one.name }
  grants       = merge(var.project_grants, var.bucket_grants, var.account_grants, var.repository_grants)
  members = {
    for key, one in local.grants : key => contains(keys(local.member_names), one.member)
    ? google_service_account.service_accounts[local.member_names[one.member]].member
    : replace(one.member, "PROJECT_NUMBER", data.google_project.this.number)
  }
}

# Left on when the rest goes: others may use them.
resource "google_project_service" "services" {
  for_each           = toset(var.services)
  project            = var.project
  service            = each.value
  disable_on_destroy = false
}

resource "google_service_account" "service_accounts" {
  for_each     = var.service_accounts
  account_id   = each.key
  display_name = each.value.display_name
  description  = local.mark
  depends_on   = [google_project_service.services]
}

resource "google_project_iam_custom_role" "roles" {
  for_each    = var.roles
  role_id     = each.key
  title       = each.value.title
  stage       = each.value.stage
  permissions = each.value.included_permissions
  depends_on  = [google_project_service.services]
}

resource "google_compute_network" "networks" {
  for_each                = var.networks
  name                    = each.key
  description             = local.mark
  auto_create_subnetworks = false
  routing_mode            = "REGIONAL"
  mtu                     = each.value.mtu
  network_profile         = each.value.network_profile
  depends_on              = [google_project_service.services]

  lifecycle {
    prevent_destroy = true
  }
}

resource "google_compute_subnetwork" "subnetworks" {
  for_each                 = var.subnetworks
  name                     = each.key
  description              = local.mark
  network                  = lookup(local.network_ids, basename(each.value.network), each.value.network)
  ip_cidr_range            = each.value.ip_cidr_range
  private_ip_google_access = each.value.private_ip_google_access
  region                   = var.region
  depends_on               = [google_project_service.services]
}

resource "google_compute_firewall" "firewalls" {
  for_each      = var.firewalls
  name          = each.key
  description   = local.mark
  network       = lookup(local.network_ids, basename(each.value.network), each.value.network)
  direction     = each.value.direction
  source_ranges = each.value.source_ranges
  depends_on    = [google_project_service.services]

  dynamic "allow" {
    for_each = each.value.allowed
    content {
      protocol = allow.value.ip_protocol
      ports    = allow.value.ports
    }
  }
}

resource "google_compute_router" "routers" {
  for_each    = var.routers
  name        = each.key
  description = local.mark
  network     = lookup(local.network_ids, basename(each.value.network), each.value.network)
  region      = var.region
  depends_on  = [google_project_service.services]
}

resource "google_compute_router_nat" "nats" {
  for_each                            = var.routers
  name                                = each.value.nats[0].name
  nat_ip_allocate_option              = each.value.nats[0].nat_ip_allocate_option
  source_subnetwork_ip_ranges_to_nat  = each.value.nats[0].source_subnetwork_ip_ranges_to_nat
  enable_dynamic_port_allocation      = each.value.nats[0].enable_dynamic_port_allocation
  enable_endpoint_independent_mapping = each.value.nats[0].enable_endpoint_independent_mapping
  min_ports_per_vm                    = each.value.nats[0].min_ports_per_vm
  max_ports_per_vm                    = each.value.nats[0].max_ports_per_vm
  router                              = google_compute_router.routers[each.key].name
  region                              = var.region

  dynamic "subnetwork" {
    for_each = each.value.nats[0].subnetworks
    content {
      name                    = google_compute_subnetwork.subnetworks[basename(subnetwork.value.name)].id
      source_ip_ranges_to_nat = subnetwork.value.source_ip_ranges_to_nat
    }
  }
}

resource "google_artifact_registry_repository" "repositories" {
  for_each      = var.repositories
  repository_id = each.key
  location      = var.region
  format        = each.value.format
  description   = local.mark
  labels        = local.labels
  depends_on    = [google_project_service.services]
}

resource "google_storage_bucket" "buckets" {
  for_each                    = var.buckets
  name                        = each.key
  location                    = each.value.location
  labels                      = local.labels
  uniform_bucket_level_access = each.value.iam_configuration.uniform_bucket_level_access.enabled
  public_access_prevention    = each.value.iam_configuration.public_access_prevention
  depends_on                  = [google_project_service.services]

  hierarchical_namespace {
    enabled = each.value.hierarchical_namespace.enabled
  }

  soft_delete_policy {
    retention_duration_seconds = each.value.soft_delete_policy.retention_duration_seconds
  }

  lifecycle {
    prevent_destroy = true
  }
}

resource "google_project_iam_member" "project_grants" {
  for_each = var.project_grants
  project  = each.value.of
  role     = lookup(local.role_names, each.value.role, each.value.role)
  member   = local.members[each.key]
}

resource "google_storage_bucket_iam_member" "bucket_grants" {
  for_each   = var.bucket_grants
  bucket     = each.value.of
  role       = each.value.role
  member     = local.members[each.key]
  depends_on = [google_storage_bucket.buckets]
}

resource "google_service_account_iam_member" "account_grants" {
  for_each = var.account_grants
  service_account_id = (
    contains(keys(local.email_names), basename(each.value.of))
    ? google_service_account.service_accounts[local.email_names[basename(each.value.of)]].name
    : each.value.of
  )
  role   = each.value.role
  member = local.members[each.key]
}

resource "google_artifact_registry_repository_iam_member" "repository_grants" {
  for_each   = var.repository_grants
  project    = split("/", each.value.of)[1]
  location   = split("/", each.value.of)[3]
  repository = split("/", each.value.of)[5]
  role       = each.value.role
  member     = local.members[each.key]
  depends_on = [google_artifact_registry_repository.repositories]
}
