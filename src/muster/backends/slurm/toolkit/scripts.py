"""Scripts that a blueprint's machines run when their image is built and when they start. Texts only.

The Toolkit reads ``$(`` in them as a reference of its own: no script uses a command's output in that way.
"""

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
  "allow_kernel_upgrades": false,
  "monitoring_agent": "cloud-ops"
}
"""
INSTALL_SLURM = """\
#!/bin/bash
set -e -o pipefail
apt-get update
apt-get install -y git
ansible-pull -U https://github.com/GoogleCloudPlatform/slurm-gcp -C $(vars.slurm_gcp_version) \\
  -i localhost, --limit localhost --connection=local -e @/var/tmp/slurm_vars.json ansible/playbook.yml
"""
PYTHON = """\
#!/bin/bash
set -e
apt-get update
apt-get install -y python{python} python{python}-venv git
"""
#: Later releases of it do not start containers with these drivers.
CONTAINER_TOOLKIT = """\
Package: nvidia-container-toolkit nvidia-container-toolkit-base libnvidia-container-tools libnvidia-container1
Pin: version 1.17.7-1
Pin-Priority: 100
"""
HOLD_DRIVER = """\
#!/bin/bash
# The driver of the base image stays: another one would not match the kernel module.
set -e
dpkg-query -W -f '${Package}\\n' 'libnvidia-*-server' 'nvidia-*-server' 'libnvidia-nscq-*' 'nvidia-fabricmanager-*' \\
  'nvidia-imex-*' 2>/dev/null | xargs -r apt-mark hold
"""
#: Health of the GPUs, for Cloud Monitoring. The two services start with a GPU only: see START_DCGM.
INSTALL_DCGM = """\
#!/bin/bash
set -e
curl -fsSL -o /var/tmp/cuda-keyring.deb {repository}/cuda-keyring_1.1-1_all.deb
dpkg -i /var/tmp/cuda-keyring.deb
apt-get update
apt-get install -y --allow-downgrades datacenter-gpu-manager-4-core datacenter-gpu-manager-4-cuda13 {more}
apt-mark hold datacenter-gpu-manager-4-core datacenter-gpu-manager-4-cuda13
mkdir -p /etc/systemd/system/nvidia-persistenced.service.d
cat > /etc/systemd/system/nvidia-persistenced.service.d/persistence_mode.conf <<'END'
[Service]
ExecStart=
ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --verbose
END
systemctl daemon-reload
systemctl disable --now nvidia-dcgm.service nvidia-persistenced.service
"""
START_DCGM = """\
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
"""
#: Users keep what enroot logs in to registries with; its images and containers are on local SSD where there is one.
ENROOT = "ENROOT_CONFIG_PATH     ${HOME}/.enroot\n"
ENROOT_ON_SSD = (
    ENROOT
    + """\
ENROOT_RUNTIME_PATH    $(vars.local_ssd)/${UID}/enroot/runtime
ENROOT_CACHE_PATH      $(vars.local_ssd)/${UID}/enroot/cache
ENROOT_DATA_PATH       $(vars.local_ssd)/${UID}/enroot/data
ENROOT_TEMP_PATH       $(vars.local_ssd)/${UID}/enroot
"""
)
ALLOW_ENROOT = """\
#!/bin/bash
# Ubuntu 24.04 lets no user without privileges make namespaces, as enroot does; enroot also mounts /etc/hostname.
set -e
if [ -f /proc/sys/kernel/apparmor_restrict_unprivileged_userns ]; then
  echo 'kernel.apparmor_restrict_unprivileged_userns = 0' > /etc/sysctl.d/90-enroot.conf
  sysctl -p /etc/sysctl.d/90-enroot.conf
fi
[ -f /etc/hostname ] || hostname > /etc/hostname
"""
#: Keys, then the repository of the transport, then the transport: only then can apt read an ar+https repository.
ARTIFACT_REGISTRY = """\
curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg \\
  | gpg --batch --yes --dearmor -o /usr/share/keyrings/google-apt.gpg
curl -fsSL https://us-apt.pkg.dev/doc/repo-signing-key.gpg \\
  | gpg --batch --yes --dearmor -o /usr/share/keyrings/google-artifacts.gpg
echo "deb [signed-by=/usr/share/keyrings/google-apt.gpg] https://packages.cloud.google.com/apt" \\
  "apt-transport-artifact-registry-stable main" > /etc/apt/sources.list.d/artifact-registry.list
apt-get update
apt-get install -y apt-transport-artifact-registry
"""
GIB = (
    """\
#!/bin/bash
set -e -o pipefail
"""
    + ARTIFACT_REGISTRY
    + """\
echo "deb [signed-by=/usr/share/keyrings/google-artifacts.gpg]" \\
  "ar+https://us-apt.pkg.dev/projects/gce-ai-infra gpudirect-gib-apt main" > /etc/apt/sources.list.d/gpudirect-gib.list
apt-get update
apt-get install -y --allow-change-held-packages libnccl2={libnccl} libnccl-dev={libnccl} nccl-gib={gib}
apt-mark hold nccl-gib
"""
)
TCPXO = (
    """\
#!/bin/bash
set -e -o pipefail
"""
    + ARTIFACT_REGISTRY
    + """\
echo "deb [arch=all trusted=yes] ar+https://us-apt.pkg.dev/projects/gce-ai-infra gpudirect-tcpxo-apt main" \\
  > /etc/apt/sources.list.d/gpudirect-tcpxo.list
apt-get update
apt-get install -y dkms
# The module's source as packaged does not build on kernel 6.17, which wants this name as a string.
cd /var/tmp
apt-get download dmabuf-import-helper
dpkg-deb -x dmabuf-import-helper_*.deb /var/tmp/dmabuf
cp -r /var/tmp/dmabuf/usr/src/dmabuf-import-helper-1.1 /usr/src/
sed -i 's/MODULE_IMPORT_NS(DMA_BUF)/MODULE_IMPORT_NS("DMA_BUF")/' /usr/src/dmabuf-import-helper-1.1/import-helper.c
dkms add -m dmabuf-import-helper -v 1.1
dkms build -m dmabuf-import-helper -v 1.1
dkms install -m dmabuf-import-helper -v 1.1
"""
)
#: The NICs' doorbells: PCI functions of their own, which NCCL's plugin opens below /dev/aperture_devices.
APERTURE_RULE = """\
ACTION=="add", SUBSYSTEM=="pci", ATTR{vendor}=="0x1ae0", ATTR{device}=="0x0084", TAG+="systemd", \\
    RUN+="/usr/bin/mkdir --mode=0755 -p /dev/aperture_devices", \\
    RUN+="/usr/bin/systemd-mount --type=none --options=bind --collect %S/%p /dev/aperture_devices/%k", \\
    RUN+="/usr/bin/bash -c '/usr/bin/chmod 0666 /dev/aperture_devices/%k/resource*'"
"""
UPDATE_INITRAMFS = "#!/bin/bash\nset -e\nupdate-initramfs -u -k all\n"
WAIT_FOR_APERTURES = """\
#!/bin/bash
# slurmd starts once the aperture devices are there: a job that came before them would train over TCP.
set -e
cat > /usr/local/bin/wait-for-aperture-devices.sh <<'END'
#!/bin/bash
for try in {1..30}; do
  compgen -G '/dev/aperture_devices/*' > /dev/null && exit 0
  sleep 2
done
exit 1
END
chmod 0755 /usr/local/bin/wait-for-aperture-devices.sh
mkdir -p /etc/systemd/system/slurmd.service.d
cat > /etc/systemd/system/slurmd.service.d/aperture.conf <<'END'
[Service]
ExecCondition=/usr/local/bin/wait-for-aperture-devices.sh
END
systemctl daemon-reload
"""
PROLOG = """\
#!/bin/bash
set -e
ROOT=/opt/apps/adm/slurm
mkdir -m 0755 -p "$ROOT/scripts" "$ROOT/partition-{partition}-prolog_slurmd.d" \\
  "$ROOT/partition-{partition}-epilog_slurmd.d"
# A node whose GPUs fail their test after a job is drained.
ln -sf /slurm/scripts/tools/gpu-test "$ROOT/partition-{partition}-epilog_slurmd.d/gpu-test.epilog_slurmd"
"""
RXDM = """\
curl -fsS -o "$ROOT/scripts/rxdm" {prolog}
chmod 0755 "$ROOT/scripts/rxdm"
ln -sf "$ROOT/scripts/rxdm" "$ROOT/partition-{partition}-prolog_slurmd.d/rxdm.prolog_slurmd"
ln -sf "$ROOT/scripts/rxdm" "$ROOT/partition-{partition}-epilog_slurmd.d/rxdm.epilog_slurmd"
"""
#: Of the machine on which the image is built: software that updates itself would part from the held driver.
NO_UPGRADES = """\
#cloud-config
create_hostname_file: true
write_files:
- path: /etc/apt/apt.conf.d/20auto-upgrades
  permissions: '0644'
  owner: root
  content: |
    APT::Periodic::Update-Package-Lists "0";
    APT::Periodic::Unattended-Upgrade "0";
"""


def build_runners(table: Toolkit, family: Family) -> list[Runner]:
    """While the image is built."""
    tcpxo = family.fabric == "tcpxo"
    more = "nvidia-container-toolkit" if tcpxo else "ibverbs-utils"
    dcgm = INSTALL_DCGM.format(repository=table.cuda_repository, more=more)
    return [
        _data("/etc/apt/preferences.d/nvidia-container-toolkit", CONTAINER_TOOLKIT),
        _shell("hold-driver.sh", HOLD_DRIVER),
        _data("/var/tmp/slurm_vars.json", SLURM_VARIABLES),
        _shell("install-slurm.sh", INSTALL_SLURM),
        _shell("install-dcgm.sh", dcgm),
        _data("/etc/security/limits.d/99-muster.conf", LIMITS),
        _data("/etc/enroot/enroot.conf", ENROOT),
        _shell("install-python.sh", PYTHON.format(python=table.python)),
        *(
            [
                _shell("install-tcpxo.sh", TCPXO),
                _data("/etc/udev/rules.d/00-a3-megagpu.rules", APERTURE_RULE),
                _shell("update-initramfs.sh", UPDATE_INITRAMFS),
            ]
            if tcpxo
            else []
        ),
    ]


def node_runners(table: Toolkit, family: Family) -> list[Runner]:
    """When a GPU node starts."""
    if family.fabric == "tcpxo":
        fabric = _shell("wait-for-apertures.sh", WAIT_FOR_APERTURES)
    else:
        fabric = _shell("install-gib.sh", GIB.format(libnccl=table.nccl["libnccl"], gib=table.nccl["gib"]))
    return [
        _data("/etc/enroot/enroot.conf", ENROOT_ON_SSD),
        _shell("allow-enroot.sh", ALLOW_ENROOT),
        fabric,
        _shell("start-dcgm.sh", START_DCGM),
    ]


def controller_runners(family: Family, partition: str) -> list[Runner]:
    """When the controller starts: prologs and epilogs that every node runs around a job."""
    text = PROLOG + (RXDM if family.prolog else "")
    return [_shell("stage-prologs.sh", text.format(partition=partition, prolog=family.prolog))]


def _shell(name: str, content: str) -> Runner:
    return {"type": "shell", "destination": name, "content": content}


def _data(path: str, content: str) -> Runner:
    return {"type": "data", "destination": path, "content": content}
