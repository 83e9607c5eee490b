#!/bin/bash
set -e -o pipefail
curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg \
  | gpg --batch --yes --dearmor -o /usr/share/keyrings/google-apt.gpg
curl -fsSL https://us-apt.pkg.dev/doc/repo-signing-key.gpg \
  | gpg --batch --yes --dearmor -o /usr/share/keyrings/google-artifacts.gpg
echo "deb [signed-by=/usr/share/keyrings/google-apt.gpg] https://packages.cloud.google.com/apt" \
  "apt-transport-artifact-registry-stable main" > /etc/apt/sources.list.d/artifact-registry.list
apt-get update
apt-get install -y apt-transport-artifact-registry
echo "deb [signed-by=/usr/share/keyrings/google-artifacts.gpg]" \
  "ar+https://us-apt.pkg.dev/projects/gce-ai-infra gpudirect-gib-apt main" > /etc/apt/sources.list.d/gpudirect-gib.list
apt-get update
apt-get install -y --allow-change-held-packages libnccl2=@libnccl@ libnccl-dev=@libnccl@ nccl-gib=@gib@
apt-mark hold nccl-gib
