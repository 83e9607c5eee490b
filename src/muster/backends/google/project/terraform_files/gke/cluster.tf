# The cluster with its pools of nodes.

variable "clusters" {
  description = "The one cluster, by its name."
  type = map(object({
    network                  = string
    subnetwork               = string
    addons_config            = object({ gcs_fuse_csi_driver_config = object({ enabled = bool }) })
    workload_identity_config = object({ workload_pool = string })
    release_channel          = object({ channel = string })
    network_config = object({
      datapath_provider            = string
      enable_multi_networking      = bool
      default_enable_private_nodes = optional(bool, false)
    })
    control_plane_endpoints_config = optional(object({
      ip_endpoints_config = object({
        authorized_networks_config = object({
          gcp_public_cidrs_access_enabled = bool
          cidr_blocks                     = list(object({ cidr_block = string, display_name = string }))
        })
      })
    }))
  }))
  validation {
    condition     = length(var.clusters) == 1
    error_message = "One cluster is wanted."
  }
}

variable "node_pools" {
  type = map(object({
    cluster             = string
    initial_node_count  = number
    locations           = list(string)
    management          = object({ auto_repair = bool, auto_upgrade = bool })
    queued_provisioning = optional(object({ enabled = bool }))
    placement_policy    = optional(object({ type = string }))
    autoscaling = optional(object({
      total_min_node_count = number
      total_max_node_count = number
      location_policy      = string
    }))
    network_config = optional(object({
      enable_private_nodes            = optional(bool)
      additional_node_network_configs = optional(list(object({ network = string, subnetwork = string })), [])
    }))
    config = object({
      machine_type                       = string
      service_account                    = string
      disk_type                          = string
      disk_size_gb                       = number
      oauth_scopes                       = list(string)
      workload_metadata_config           = object({ mode = string })
      labels                             = optional(map(string))
      spot                               = optional(bool)
      flex_start                         = optional(bool)
      max_run_duration                   = optional(string)
      gvnic                              = optional(object({ enabled = bool }))
      fast_socket                        = optional(object({ enabled = bool }))
      gcfs_config                        = optional(object({ enabled = bool }))
      ephemeral_storage_local_ssd_config = optional(object({ local_ssd_count = number }))
      accelerators = optional(list(object({
        accelerator_type               = string
        accelerator_count              = number
        gpu_driver_installation_config = object({ gpu_driver_version = string })
      })), [])
      reservation_affinity = optional(object({
        consume_reservation_type = string
        key                      = optional(string)
        values                   = optional(list(string))
      }))
    })
  }))
}

locals {
  account_emails = { for name, one in var.service_accounts : one.email => google_service_account.service_accounts[name].email }
}

resource "google_container_cluster" "clusters" {
  for_each                 = var.clusters
  name                     = each.key
  description              = local.mark
  resource_labels          = local.labels
  network                  = lookup(local.network_ids, basename(each.value.network), each.value.network)
  subnetwork               = google_compute_subnetwork.subnetworks[basename(each.value.subnetwork)].id
  location                 = var.region
  datapath_provider        = each.value.network_config.datapath_provider
  enable_multi_networking  = each.value.network_config.enable_multi_networking
  networking_mode          = "VPC_NATIVE"
  initial_node_count       = 1
  remove_default_node_pool = true
  deletion_protection      = false
  depends_on = [
    google_project_service.services,
    google_compute_router_nat.nats,
    google_service_account.service_accounts,
    google_project_iam_member.project_grants,
    google_artifact_registry_repository_iam_member.repository_grants,
  ]

  ip_allocation_policy {}

  addons_config {
    gcs_fuse_csi_driver_config {
      enabled = each.value.addons_config.gcs_fuse_csi_driver_config.enabled
    }
  }

  workload_identity_config {
    workload_pool = each.value.workload_identity_config.workload_pool
  }

  release_channel {
    channel = each.value.release_channel.channel
  }

  dynamic "private_cluster_config" {
    for_each = each.value.network_config.default_enable_private_nodes ? [true] : []
    content {
      enable_private_nodes    = true
      enable_private_endpoint = false
    }
  }

  dynamic "master_authorized_networks_config" {
    for_each = each.value.control_plane_endpoints_config[*].ip_endpoints_config.authorized_networks_config
    content {
      gcp_public_cidrs_access_enabled = master_authorized_networks_config.value.gcp_public_cidrs_access_enabled

      dynamic "cidr_blocks" {
        for_each = master_authorized_networks_config.value.cidr_blocks
        content {
          cidr_block   = cidr_blocks.value.cidr_block
          display_name = cidr_blocks.value.display_name
        }
      }
    }
  }

  # Of a cluster that is there: what it began with, and what `muster up` asked for as well.
  lifecycle {
    ignore_changes = [initial_node_count, maintenance_policy, node_config, node_pool, remove_default_node_pool]
  }
}

resource "google_container_node_pool" "node_pools" {
  for_each           = var.node_pools
  name               = each.key
  cluster            = google_container_cluster.clusters[each.value.cluster].name
  location           = var.region
  node_locations     = each.value.locations
  initial_node_count = each.value.initial_node_count

  management {
    auto_repair  = each.value.management.auto_repair
    auto_upgrade = each.value.management.auto_upgrade
  }

  node_config {
    machine_type     = each.value.config.machine_type
    service_account  = lookup(local.account_emails, each.value.config.service_account, each.value.config.service_account)
    disk_type        = each.value.config.disk_type
    disk_size_gb     = each.value.config.disk_size_gb
    oauth_scopes     = each.value.config.oauth_scopes
    resource_labels  = local.labels
    labels           = each.value.config.labels
    spot             = each.value.config.spot
    flex_start       = each.value.config.flex_start
    max_run_duration = each.value.config.max_run_duration

    workload_metadata_config {
      mode = each.value.config.workload_metadata_config.mode
    }

    dynamic "guest_accelerator" {
      for_each = each.value.config.accelerators
      content {
        type  = guest_accelerator.value.accelerator_type
        count = guest_accelerator.value.accelerator_count

        gpu_driver_installation_config {
          gpu_driver_version = guest_accelerator.value.gpu_driver_installation_config.gpu_driver_version
        }
      }
    }

    dynamic "gvnic" {
      for_each = each.value.config.gvnic[*]
      content {
        enabled = gvnic.value.enabled
      }
    }

    dynamic "fast_socket" {
      for_each = each.value.config.fast_socket[*]
      content {
        enabled = fast_socket.value.enabled
      }
    }

    dynamic "gcfs_config" {
      for_each = each.value.config.gcfs_config[*]
      content {
        enabled = gcfs_config.value.enabled
      }
    }

    dynamic "ephemeral_storage_local_ssd_config" {
      for_each = each.value.config.ephemeral_storage_local_ssd_config[*]
      content {
        local_ssd_count = ephemeral_storage_local_ssd_config.value.local_ssd_count
      }
    }

    dynamic "reservation_affinity" {
      for_each = each.value.config.reservation_affinity[*]
      content {
        consume_reservation_type = reservation_affinity.value.consume_reservation_type
        key                      = reservation_affinity.value.key
        values                   = reservation_affinity.value.values
      }
    }
  }

  dynamic "autoscaling" {
    for_each = each.value.autoscaling[*]
    content {
      total_min_node_count = autoscaling.value.total_min_node_count
      total_max_node_count = autoscaling.value.total_max_node_count
      location_policy      = autoscaling.value.location_policy
    }
  }

  dynamic "queued_provisioning" {
    for_each = each.value.queued_provisioning[*]
    content {
      enabled = queued_provisioning.value.enabled
    }
  }

  dynamic "placement_policy" {
    for_each = each.value.placement_policy[*]
    content {
      type = placement_policy.value.type
    }
  }

  dynamic "network_config" {
    for_each = each.value.network_config[*]
    content {
      enable_private_nodes = network_config.value.enable_private_nodes

      # By reference: a pool cannot come before its data networks.
      dynamic "additional_node_network_configs" {
        for_each = network_config.value.additional_node_network_configs
        content {
          network    = google_compute_network.networks[additional_node_network_configs.value.network].name
          subnetwork = google_compute_subnetwork.subnetworks[additional_node_network_configs.value.subnetwork].name
        }
      }
    }
  }

  # What is there is made larger by another run file, never smaller; the autoscaler changes the number itself.
  lifecycle {
    ignore_changes = [initial_node_count]
  }
}
