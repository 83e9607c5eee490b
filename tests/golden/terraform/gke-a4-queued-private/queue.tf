data "google_client_config" "this" {}

provider "helm" {
  kubernetes = {
    host                   = "https://${google_container_cluster.muster.endpoint}"
    token                  = data.google_client_config.this.access_token
    cluster_ca_certificate = base64decode(google_container_cluster.muster.master_auth[0].cluster_ca_certificate)
  }
}

resource "helm_release" "jobset" {
  name             = "jobset"
  repository       = "oci://registry.k8s.io/jobset/charts"
  chart            = "jobset"
  version          = "0.12.0"
  namespace        = "jobset-system"
  create_namespace = true
  depends_on       = [google_container_node_pool.muster_cpu]
}

resource "helm_release" "kueue" {
  name             = "kueue"
  repository       = "oci://registry.k8s.io/kueue/charts"
  chart            = "kueue"
  version          = "0.19.2"
  namespace        = "kueue-system"
  create_namespace = true
  values           = [file("${path.module}/kueue-values.yaml")]
  depends_on       = [helm_release.jobset]
}

resource "helm_release" "muster" {
  name             = "muster-queue"
  chart            = "${path.module}/muster-queue"
  namespace        = "default"
  create_namespace = false
  depends_on       = [helm_release.kueue]
}
