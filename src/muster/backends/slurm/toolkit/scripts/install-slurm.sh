#!/bin/bash
set -e -o pipefail
apt-get update
apt-get install -y git
ansible-pull -U https://github.com/GoogleCloudPlatform/slurm-gcp -C $(vars.slurm_gcp_version) \
  -i localhost, --limit localhost --connection=local -e @/var/tmp/slurm_vars.json ansible/playbook.yml
