variable "project" {
  type = string
  validation {
    condition     = length(var.project) > 0
    error_message = "The project's ID is empty."
  }
}

variable "region" {
  type = string
  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "A region is wanted, as us-central1."
  }
}

variable "services" {
  type = list(string)
}

variable "service_accounts" {
  type    = map(object({ email = string, display_name = string }))
  default = {}
}

variable "roles" {
  type    = map(object({ title = string, stage = string, included_permissions = list(string) }))
  default = {}
}

variable "networks" {
  type    = map(object({ mtu = optional(number), network_profile = optional(string) }))
  default = {}
}

variable "subnetworks" {
  type = map(object({
    network                  = string
    ip_cidr_range            = string
    private_ip_google_access = optional(bool)
  }))
  default = {}
}

variable "firewalls" {
  type = map(object({
    network       = string
    direction     = string
    source_ranges = list(string)
    allowed       = list(object({ ip_protocol = string, ports = optional(list(string)) }))
  }))
  default = {}
}

variable "routers" {
  description = "Each with one way out."
  type = map(object({
    network = string
    nats = list(object({
      name                                = string
      nat_ip_allocate_option              = string
      source_subnetwork_ip_ranges_to_nat  = string
      enable_dynamic_port_allocation      = bool
      enable_endpoint_independent_mapping = bool
      min_ports_per_vm                    = number
      max_ports_per_vm                    = number
      subnetworks                         = optional(list(object({ name = string, source_ip_ranges_to_nat = list(string) })), [])
    }))
  }))
  default = {}
}

variable "repositories" {
  type    = map(object({ format = string }))
  default = {}
}

variable "buckets" {
  type = map(object({
    location               = string
    hierarchical_namespace = object({ enabled = bool })
    soft_delete_policy     = object({ retention_duration_seconds = number })
    iam_configuration = object({
      uniform_bucket_level_access = object({ enabled = bool })
      public_access_prevention    = string
    })
  }))
  default = {}
}

variable "project_grants" {
  type    = map(object({ of = string, role = string, member = string }))
  default = {}
}

variable "bucket_grants" {
  type    = map(object({ of = string, role = string, member = string }))
  default = {}
}

variable "account_grants" {
  type    = map(object({ of = string, role = string, member = string }))
  default = {}
}

variable "repository_grants" {
  type    = map(object({ of = string, role = string, member = string }))
  default = {}
}
