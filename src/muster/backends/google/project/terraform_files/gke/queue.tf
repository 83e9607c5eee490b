# What runs on the cluster: JobSet and Kueue by their charts, and a chart that only carries the manifests of queue,
# account and networks. Helm's provider reaches the cluster with the credentials of whoever applies.

variable "jobset_version" {
  type = string
}

variable "kueue_version" {
  description = "null: no Kueue, the machines are this run's alone."
  type        = string
  default     = null
}

variable "namespace" {
  type    = string
  default = "default"
}

locals {
  cluster = one(values(google_container_cluster.clusters))
}

data "google_client_config" "this" {}

provider "helm" {
  kubernetes = {
    host                   = "https://${local.cluster.endpoint}"
    token                  = data.google_client_config.this.access_token
    cluster_ca_certificate = base64decode(local.cluster.master_auth[0].cluster_ca_certificate)
  }
}

resource "helm_release" "jobset" {
  name             = "jobset"
  repository       = "oci://registry.k8s.io/jobset/charts"
  chart            = "jobset"
  version          = var.jobset_version
  namespace        = "jobset-system"
  create_namespace = true
  depends_on       = [google_container_node_pool.node_pools]
}

resource "helm_release" "kueue" {
  count            = var.kueue_version == null ? 0 : 1
  name             = "kueue"
  repository       = "oci://registry.k8s.io/kueue/charts"
  chart            = "kueue"
  version          = var.kueue_version
  namespace        = "kueue-system"
  create_namespace = true
  values           = [file("${path.module}/kueue-values.yaml")]
  depends_on       = [helm_release.jobset]
}

resource "helm_release" "muster" {
  name             = "muster-queue"
  chart            = "${path.module}/muster-queue"
  namespace        = var.namespace
  create_namespace = var.namespace != "default"
  depends_on       = [helm_release.kueue]
}
