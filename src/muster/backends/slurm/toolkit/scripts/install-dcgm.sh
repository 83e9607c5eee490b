#!/bin/bash
set -e
curl -fsSL -o /var/tmp/cuda-keyring.deb @repository@/cuda-keyring_1.1-1_all.deb
dpkg -i /var/tmp/cuda-keyring.deb
apt-get update
apt-get install -y --allow-downgrades datacenter-gpu-manager-4-core datacenter-gpu-manager-4-cuda13 @dcgm_needs@
apt-mark hold datacenter-gpu-manager-4-core datacenter-gpu-manager-4-cuda13
mkdir -p /etc/systemd/system/nvidia-persistenced.service.d
cat > /etc/systemd/system/nvidia-persistenced.service.d/persistence_mode.conf <<'END'
[Service]
ExecStart=
ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --verbose
END
systemctl daemon-reload
systemctl disable --now nvidia-dcgm.service nvidia-persistenced.service
