"""Scripts that a blueprint's machines run when their image is built and when they start. Texts only."""

from __future__ import annotations

from muster.catalog.toolkit import Family, Toolkit

Runner = dict[str, str]

LIMITS = "* - memlock unlimited\n* - nproc unlimited\n* - stack unlimited\n* - nofile 1048576\n"
#: slurm-gcp's own playbook, without the parts that a training node does not need.
SLURM_VARIABLES = """\
{
  "reboot": false,
  "install_cuda": false,
  "install_gcsfuse": true,
  "install_ompi": false,
  "install_lustre": false,
  "install_managed_lustre": false,
  "monitoring_agent": "cloud-ops"
}
"""
INSTALL_SLURM = """\
#!/bin/bash
set -e -o pipefail
ansible-pull -U https://github.com/GoogleCloudPlatform/slurm-gcp -C $(vars.slurm_gcp_version) \\
  -i localhost, --limit localhost --connection=local -e @/var/tmp/slurm_vars.json ansible/playbook.yml
"""
PYTHON = """\
#!/bin/bash
set -e
apt-get update
apt-get install -y python3-venv git
"""
HOLD_DRIVER = """\
#!/bin/bash
# The driver of the base image stays: another one would not match the kernel module.
set -e
dpkg-query -W -f '${Package}\\n' 'libnvidia-*-server' 'nvidia-*-server' 'nvidia-fabricmanager-*' 2>/dev/null \\
  | xargs -r apt-mark hold
"""
GIB = """\
#!/bin/bash
set -e
apt-get update
apt-get install -y apt-transport-artifact-registry libnccl2={libnccl} libnccl-dev={libnccl}
echo "deb ar+https://us-apt.pkg.dev/projects/gce-ai-infra gpudirect-gib-apt main" \\
  > /etc/apt/sources.list.d/gpudirect-gib.list
curl -fsS https://us-apt.pkg.dev/doc/repo-signing-key.gpg | apt-key add -
apt-get update
apt-get install -y nccl-gib={gib}
apt-mark hold nccl-gib
"""
TCPXO = """\
#!/bin/bash
set -e
apt-get update
apt-get install -y apt-transport-artifact-registry dkms
echo "deb [arch=all trusted=yes] ar+https://us-apt.pkg.dev/projects/gce-ai-infra gpudirect-tcpxo-apt main" \\
  > /etc/apt/sources.list.d/gpudirect-tcpxo.list
apt-get update
apt-get install -y dmabuf-import-helper
"""
PROLOG = """\
#!/bin/bash
set -e
ROOT=/opt/apps/adm/slurm
mkdir -m 0755 -p "$ROOT/scripts" "$ROOT/partition-{partition}-prolog_slurmd.d" \\
  "$ROOT/partition-{partition}-epilog_slurmd.d"
curl -fsS -o "$ROOT/scripts/rxdm" {prolog}
chmod 0755 "$ROOT/scripts/rxdm"
ln -sf "$ROOT/scripts/rxdm" "$ROOT/partition-{partition}-prolog_slurmd.d/rxdm.prolog_slurmd"
ln -sf "$ROOT/scripts/rxdm" "$ROOT/partition-{partition}-epilog_slurmd.d/rxdm.epilog_slurmd"
"""
NOTHING = "#!/bin/bash\ntrue\n"


def build_runners(family: Family) -> list[Runner]:
    """While the image is built."""
    runners = [
        {"type": "shell", "destination": "hold-driver.sh", "content": HOLD_DRIVER},
        {"type": "data", "destination": "/var/tmp/slurm_vars.json", "content": SLURM_VARIABLES},
        {"type": "shell", "destination": "install-slurm.sh", "content": INSTALL_SLURM},
        {"type": "data", "destination": "/etc/security/limits.d/99-muster.conf", "content": LIMITS},
        {"type": "shell", "destination": "install-python.sh", "content": PYTHON},
    ]
    if family.fabric == "tcpxo":
        runners.append({"type": "shell", "destination": "install-tcpxo.sh", "content": TCPXO})
    return runners


def node_runners(table: Toolkit, family: Family) -> list[Runner]:
    """When a GPU node starts."""
    if family.fabric != "roce":
        return [{"type": "shell", "destination": "ready.sh", "content": NOTHING}]
    text = GIB.format(libnccl=table.nccl["libnccl"], gib=table.nccl["gib"])
    return [{"type": "shell", "destination": "install-gib.sh", "content": text}]


def controller_runners(family: Family, partition: str) -> list[Runner]:
    """When the controller starts: prologs that every node runs before a job."""
    text = PROLOG.format(partition=partition, prolog=family.prolog) if family.prolog else NOTHING
    return [{"type": "shell", "destination": "stage-prologs.sh", "content": text}]
