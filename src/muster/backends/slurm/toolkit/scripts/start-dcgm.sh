#!/bin/bash
set -e
AGENT=/etc/google-cloud-ops-agent/config.yaml
if ! grep -q 'type: dcgm' "$AGENT"; then
  cat >> "$AGENT" <<'END'
metrics:
  receivers:
    dcgm:
      type: dcgm
  service:
    pipelines:
      dcgm:
        receivers: [dcgm]
END
fi
systemctl enable --now nvidia-persistenced.service nvidia-dcgm.service
systemctl enable google-cloud-ops-agent.service
systemctl restart google-cloud-ops-agent.service
