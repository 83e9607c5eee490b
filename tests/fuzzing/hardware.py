"""What drivers and tools print about GPUs, links and ports: see ``targets``. None of the readers may raise."""

from __future__ import annotations

import json
from collections.abc import Iterator

from fakes.captures import DIAG_TABLE, HEALTH_TABLE, SMI_TABLE, diag_json, health_json, smi_xml

from fuzzing.running import Target
from muster.health.recognise import kind_of, recognise

SMI = b"""
==============NVSMI LOG==============

Driver Version                            : 570.124.06
Attached GPUs                             : 1
GPU 00000000:19:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    MIG Mode
        Current                           : Disabled
    GPU Recovery Action                   : None
    Clocks Event Reasons
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : Not Active
    ECC Errors
        Volatile
            DRAM Uncorrectable            : 0
    Temperature
        GPU T.Limit Temp                  : 56 C
    Fabric
        State                             : Completed
    Processes
        Process ID                        : 58130
            Name                          : python
            Used GPU Memory               : 20322 MiB

"""
CSV = (
    b"index, count, name, pci.bus_id, ecc.errors.uncorrected.volatile.total, clocks_event_reasons.active\n"
    b"0, 1, NVIDIA L4, 00000000:19:00.0, 0, 0x0000000000000004\n"
)
NODE = (
    b'{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}, "status": {"conditions": [{"type": '
    b'"XidCriticalError", "status": "True", "reason": "{\\"48\\":true}", "lastTransitionTime": "2025-06-23T18:44Z"}]}}'
)
KERNEL_LOG = (
    b"[    0.0] Linux version 6.8.0\n"
    b"4,1,51409,-;NVRM: Xid (PCI:0000:9b:00): 119, pid=7, name=x, Timeout\n"
    b"[Mon Feb 23 16:24:18 2026] NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1\n"
    b"2026-02-23T16:24:18+0000 a kernel: nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48\n"
    b"Feb 23 16:24:18 a kernel: NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.\n"
)
IBSTAT = (
    b"CA 'mlx5_0'\n\tCA type: MT4129\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n"
    b"\t\tRate: 400\n\t\tLink layer: InfiniBand\n"
)
SYSFS = (
    b"/sys/class/infiniband/mlx5_0/ports/1/state:4: ACTIVE\n/sys/class/infiniband/mlx5_0/ports/1/phys_state:5: LinkUp\n"
    b"/sys/class/infiniband/mlx5_0/ports/1/rate:400 Gb/sec (4X NDR)\n"
)
NVLINK = (
    b"GPU 0: NVIDIA A10 (UUID: GPU-0)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    b"GPU 1: NVIDIA A10 (UUID: GPU-1)\n\t Link 0: 25 GB/s\n\t Link 1: CRC Errors: 3\n"
)
NCCL_TESTS = (
    b"# nThread 1 nGpus 2 minBytes 8 maxBytes 8 step: 2(factor) validation: 1\n"
    b"#   Rank  0 Pid 7 on a device  0 [0x00] A100\n#   Rank  1 Pid 7 on a device  1 [0x00] A100\n"
    b"#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error\n"
    b"           8             2   float     sum    34.83    0.10    0.10      0    34.61    0.10    0.10    N/A\n"
    b"# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 0.1\n"
)
EVENTS = (
    b"[ 1.0] oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/a,task=python,pid=7,uid=0\n"
    b"[ 2.0] x[7]: segfault at 8 ip 00007f1f0ba9b33c sp 0 error 4 in libnccl.so.2[7f1f0ba60000+9e000]\n"
    b"[ 3.0] mlx5_core 0000:5c:00.0 ib0: Link up\n[ 4.0] mlx5_core 0000:5c:00.0 ib0: Link down\n"
    b"[ 5.0] Buffer I/O error on dev sda1, logical block 9\n[ 6.0] Kernel panic - not syncing: x\n"
)
FABRIC = b"[Jul 23 2026 07:53:01] [ERROR] [tid 841] detected NVSwitch fatal error 20034 on fid 0 port 33\n"
SERVICE = (
    b"x nvidia-fabricmanager.service - y\n   Active: active (running) since z\nFabric Manager version is : 535.1\n"
)


def reports() -> Iterator[Target]:
    written = (SMI_TABLE, smi_xml(), DIAG_TABLE, HEALTH_TABLE.format("Healthy", ""), json.dumps(diag_json()),
               json.dumps(health_json("Failure", "link 3 is down")))  # fmt: skip
    samples = (SMI, CSV, KERNEL_LOG, EVENTS, IBSTAT, SYSFS, NVLINK, NCCL_TESTS, SERVICE, FABRIC, NODE,
               *(text.encode() for text in written))  # fmt: skip
    for sample in samples:
        kind = kind_of(sample)
        assert kind, sample
        yield Target(
            name=f"a capture: {kind}", samples=(sample,), raises=(),
            read=lambda data: recognise([("host-1/a", data), ("host-1/b", SMI)]), share=0.15,
        )  # fmt: skip
