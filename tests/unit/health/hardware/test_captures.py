# ruff: noqa: E501
"""What machines print, by kind: each is read right whole, cut, mixed with other text, and without a last newline.

Texts are written from the public formats: Linux's printk calls, NVIDIA's nvidia-smi, DCGM and fabric manager, rdma-core,
nccl-tests.
"""

import json
import random
import re

import pytest
from fakes.captures import (
    DIAG_OLD,
    DIAG_TABLE,
    HEALTH_TABLE,
    SMI_TABLE,
    diag_json,
    health_json,
    nccl_table,
    smi_xml,
)
from hardware_captures import capture
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.health.recognise import recognise
from muster.health.verdicts import Verdict, worst

BOOT = "[    0.000000] Linux version 6.8.0-1021-gcp (buildd@lcy02)\n[    1.250000] usb 1-1: new device\n"
#: How each source prefixes a line of the kernel's.
PREFIXES = {
    "dmesg": "[ 5140.900123] ", "dmesg -T": "[Sun Feb 23 16:24:18 2026] ", "dmesg -x": "kern  :err   : [ 5140.900123] ",
    "dmesg iso": "2026-02-23T16:24:18,500000+00:00 ", "kmsg": "3,1234,5140900123,-;", "caller": "[ 5140.900123][ T812] ",
    "journald": "Feb 23 16:24:18 gpu-node_01.rack-7.example.com kernel: ", "delta": "[  +0.000012] ",
    "journald iso": "2026-02-23T16:24:18+0000 10.0.0.7 kernel: ", "reltime": "[Feb23 16:24] ",
    "syslog": "Feb 23 16:24:18 node-1 kernel: [ 5140.900123] ", "rfc5424": "<4>1 2026-02-23T16:24:18.5Z node-1 kernel - - - ",
    "grep": "/var/log/kern.log:7:Feb 23 16:24:18 node kernel: ", "short-full": "Mon 2026-02-23 16:24:18 UTC node kernel: ",
    "colour": "\x1b[32m[ 5140.900123] \x1b[0m", "none": "",
}  # fmt: skip
OTHER = "$ uname -a\nLinux node-1 6.8.0\nINFO step 41: loss 2.13\n"


def judged(*texts):
    return recognise([(f"capture-{number}", text.encode()) for number, text in enumerate(texts)])


def only(text, check):
    """The one finding of this check, and no other that condemns."""
    found = judged(text).findings
    (one,) = [each for each in found if each.check == check]
    assert all(each is one or not each.verdict.faulty for each in found), found
    return one


def ways(lines, prefix):
    """The same lines as they may reach us: alone, at the end of a log, without a newline, with CRLF, in other text."""
    said = "".join(prefix + line + "\n" for line in lines)
    return (said, BOOT + said, said.removesuffix("\n"), said.replace("\n", "\r\n"), OTHER + said + "\n$ exit\n")


KERNEL = [
    (["python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=986", "Call Trace:",
      "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0-1,oom_memcg=/kubepods/a,"
      "task_memcg=/kubepods/a/b,task=python,pid=863987,uid=0",
      "Memory cgroup out of memory: Killed process 863987 (python) total-vm:1449328kB, anon-rss:981204kB, UID:0 pgtables:9kB",
      "oom_reaper: reaped process 863987 (python), now anon-rss:0kB"],
     "host.memory", "app", ["863987", "python", "memory"]),
    (["Out of memory: Kill process 24572 (java) score 905 or sacrifice child",
      "Killed process 28438 (pt_data_worker) total-vm:20255636kB, anon-rss:466160kB, file-rss:13684kB"],
     "host.memory", "app", ["28438", "pt_data_worker"]),
    (["Out of memory: Killed process 9999 (Plex Media Server)."], "host.memory", "app", ["9999 (Plex Media Server)"]),
    (["Killed process 28438 (java), UID 1000, total-vm:20255636kB, anon-rss:1kB"], "host.memory", "app", ["28438 (java)"]),
    (["python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL)"], "host.memory", "incomplete", ["python", "not in the capture"]),
    (["nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing"] * 3,
     "gpu.peermem", "note", ["invalid context", "3 times"]),
    (["nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client",
      "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)"], "gpu.peermem", "note", ["does not work"]),
    (["nv_peer_mem: Unknown symbol nvidia_p2p_get_pages (err -22)"], "gpu.peermem", "note", ["nv_peer_mem", "host's memory"]),
    (["pt_main_thread[2536443]: segfault at 7f797fe00000 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4 in "
      "libnccl.so.2[7f7c7ac00000+d3d3000]", "Code: 48 8b 07 48"], "program.crash", "app",
     ["2536443", "pt_main_thread", "0x7f797fe00000", "libnccl.so.2", "0x69996"]),
    (["python3[77]: segfault at 8 ip 00007f1f0ba9b33c sp 00007ffe error 4 in libnccl.so.2.21.5[3c000,7f1f0ba60000+9e000]"
      " likely on CPU 5 (core 5, socket 0)"], "program.crash", "app", ["77", "libnccl.so.2.21.5", "0x7733c"]),
    (["traps: python3[812] general protection fault ip:7f7c7ac69996 sp:7f7c error:0 in libnccl.so.2[7f7c7ac00000+d3d3000]"],
     "program.crash", "app", ["812", "general protection fault", "libnccl.so.2"]),
    (["mlx5_core 0000:5c:00.0 enp92s0f0np0: Link up", "mlx5_core 0000:5c:00.0 enp92s0f0np0: Link down",
      "mlx5_core 0000:5c:00.0 enp92s0f0np0: Link up", "mlx5_core 0000:5c:00.0 enp92s0f0np0: Link down",
      "mlx5_core 0000:5c:00.0 enp92s0f0np0: Link up", "mlx5_core 0000:5c:00.0 enp92s0f0np0: Link down",
      "mlx5_core 0000:5c:00.0 enp92s0f0np0: Link up"], "net.link", "drain", ["enp92s0f0np0", "3 times"]),
    (["igb 0000:00:14.0 eth0: igb: eth0 NIC Link is Up 1000 Mbps Full Duplex", "igb 0000:00:14.0 eth0: igb: eth0 NIC Link is Down",
      "igb 0000:00:14.0 eth0: igb: eth0 NIC Link is Up 1000 Mbps Full Duplex"], "net.link", "note", ["eth0", "once"]),
    (["mlx5_core 0000:5c:00.0 ib0: Link up", "mlx5_core 0000:5c:00.0 ib0: Link down"], "net.link", "drain", ["not come back"]),
    (["blk_update_request: I/O error, dev nvme0n1, sector 1953 op 0x0:(READ) flags 0x80700 phys_seg 1",
      "Buffer I/O error on dev nvme0n1, logical block 1308098575, lost async page write"], "host.disk", "drain", ["nvme0n1"]),
    (["critical medium error, dev sda, sector 12345"] * 2, "host.disk", "drain", ["sda", "2 times"]),
    (["I/O error, dev fd0, sector 0 op 0x0:(READ)"], "host.disk", "note", ["fd"]),
    (["critical target error, dev nvme0n1, sector 1953 op 0x3:(DISCARD) flags 0x800"], "host.disk", "note", ["nvme0n1"]),
    (["Buffer I/O error on dev nbd0, logical block 0"], "host.disk", "note", ["nbd"]),
    (["EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm python: reading directory lblock 0",
      "EXT4-fs (sda1): Remounting filesystem read-only"], "host.disk", "drain", ["EXT4-fs", "sda1"]),
    (["XFS (nvme1n1p1): metadata I/O error in \"xfs_buf_ioend\" at daddr 0x1"], "host.disk", "drain", ["XFS", "nvme1n1p1"]),
    (["nvme0n1: I/O Cmd(0x2) @ LBA 0, 8 blocks, I/O Error (sct 0x2 / sc 0x81) MORE"], "host.disk", "drain", ["nvme0n1"]),
    (["JBD2: Detected IO errors while flushing file data on sda1-8"], "host.disk", "drain", ["sda1-8"]),
    (["XFS (dm-0): Filesystem has been shut down due to log error (0x2)."], "host.disk", "drain", ["XFS", "dm-0"]),
    (["modprobe: ERROR: could not insert 'nvidia_peermem': Invalid argument"], "gpu.peermem", "note", ["does not work"]),
    (["gve 0000:00:04.0 eth0: Device link is up.", "gve 0000:00:04.0 eth0: Device link is down.",
      "gve 0000:00:04.0 eth0: Device link is up."], "net.link", "note", ["eth0", "once"]),
    (["nvme nvme4: I/O tag 22 (2016) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller",
      "nvme nvme4: Disabling device after reset failure: -19"], "host.disk", "drain", ["nvme4", "2 times"]),
    (["md/raid0md0: Disk failure on nvme0n1p1 detected, failing array."], "host.disk", "drain", ["nvme0n1p1"]),
    (["Kernel panic - not syncing: hung_task: blocked tasks", "CPU: 24 PID: 1364 Comm: khungtaskd Tainted: P"],
     "host.kernel", "replace", ["panicked", "hung_task: blocked tasks"]),
    (["Kernel panic - not syncing: Fatal exception in interrupt"], "host.kernel", "replace", ["Fatal exception in interrupt"]),
    (["BUG: unable to handle page fault for address: ffffb1f3", "#PF: supervisor read access in kernel mode",
      "Oops: 0000 [#1] SMP NOPTI"], "host.kernel", "drain", ["unable to handle page fault"]),
    (["watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]"], "host.kernel", "note", ["stuck"]),
    (["INFO: task nv_open_q:3207 blocked for more than 120 seconds."], "host.kernel", "note", ["3207", "nv_open_q"]),
]  # fmt: skip


@pytest.mark.parametrize("source", PREFIXES)
@pytest.mark.parametrize(("lines", "check", "verdict", "words"), KERNEL, ids=[row[0][0][:40] for row in KERNEL])
def test_lines_of_the_kernel_by_every_source(source, lines, check, verdict, words):
    for text in ways(lines, PREFIXES[source]):
        found = only(text, check)
        assert found.verdict == verdict and all(word in found.message for word in words), (text, found)
        assert worst(judged(text).findings) in (verdict, "incomplete")


def test_a_crash_in_nccl_comes_with_advice():
    (found,) = judged(BOOT + "".join(f"[ 9.0] {line}\n" for line in KERNEL[8][0])).findings
    assert "NCCL_DEBUG" in found.command and "another version" in found.command


def test_a_panic_before_the_last_start_is_noted_and_a_dump_of_pstore_is_read():
    panic = "<0>[  201.1] Kernel panic - not syncing: Test\n"
    assert worst(judged("Panic#1 Part1\n<6>[    2.6] usb 1-2: New USB device\n" + panic).findings) is Verdict.REPLACE
    assert worst(judged("vmcore\n" + panic.removesuffix("\n")).findings) is Verdict.REPLACE
    (found,) = judged(panic + BOOT).findings
    assert found.verdict is Verdict.NOTE and "before the machine's last start" in found.message


def test_a_link_that_is_down_while_its_driver_loads_is_no_loss():
    up, down = ("mlx5_core 0000:41:00.0 ens1: Link " + state for state in ("up", "down"))
    assert (
        worst(judged(f"{BOOT}[    9.0] {down}\n[   10.0] {up}\n[   11.0] ata3: SATA link down (SStatus 0)\n").findings)
        is Verdict.HEALTHY
    )


def test_lines_of_sound_machines_that_look_like_faults():
    quiet = [
        "EXT4-fs (nvme0n1p1): mounted filesystem with ordered data mode. Opts: errors=remount-ro",
        "nvidia_peermem: module verification failed: signature and/or required key missing - tainting kernel",
        "Kernel command line: BOOT_IMAGE=/vmlinuz panic=10", "ata1: SATA link down (SStatus 0 SControl 300)",
        "mlx5_core 0000:5c:00.0: Port module event: module 0, Cable plugged", "pcieport 0000:00:01.0: AER: enabled",
        "nvidia 0000:19:00.0: enabling device (0140 -> 0142)", "audit: type=1400 comm=\"apparmor_parser\" error=-2",
    ]  # fmt: skip
    text = BOOT + "".join(f"[   {number}.5] {line}\n" for number, line in enumerate(quiet, 2))
    (found,) = judged(text).findings
    assert found.verdict is Verdict.HEALTHY, found


# ---------------------------------------------------------------- reports of GPUs

BAD_TABLES = [
    (("|                    0 |", "|                    3 |"), "reset", "uncorrectable"),
    (("On  | 00000000:2A", "Off | 00000000:2A"), "note", "persistence"),
    (("|             Disabled |", "|              Enabled |"), "note", "MIG"),
    (("N/A   29C    P0              69W", "ERR!  ERR!   P0             ERR!"), "reset", "cannot read"),
    (("Default |", "E. Process |"), "note", "Exclusive_Process"),
]  # fmt: skip


def test_the_table_of_nvidia_smi():
    found = only(SMI_TABLE, "gpu")
    assert found.verdict is Verdict.HEALTHY and "2 x NVIDIA H100 80GB HBM3, driver 535.161.08" in found.message
    assert only(OTHER + SMI_TABLE.replace("\n", "\r\n") + OTHER, "gpu").verdict is Verdict.HEALTHY
    assert worst(judged(SMI_TABLE.rstrip("\n")).findings) is Verdict.HEALTHY, "its last line is whole"


@pytest.mark.parametrize(("change", "verdict", "word"), BAD_TABLES, ids=[row[2] for row in BAD_TABLES])
def test_the_table_of_nvidia_smi_with_a_fault(change, verdict, word):
    text = SMI_TABLE.replace(*change, 1)
    assert text != SMI_TABLE
    for one in (text, OTHER + text, text.rstrip("\n"), text.replace("\n", "\r\n")):
        found = [each for each in judged(one).findings if each.verdict is not Verdict.INCOMPLETE]
        assert worst(found) == verdict and any(word in each.message for each in found)
        assert ({each.gpu for each in found} <= {0, 1} and len(found) == 1) or verdict == "reset"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that it runs.\n", "drain"),
     ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.183\n", "drain"),
     ("Failed to initialize NVML: Unknown Error\n", "incomplete"), ("No devices were found\n", "drain"),
     ("Unable to determine the device handle for GPU 0000:5E:00.0: GPU is lost.  Reboot the system to recover\n", "replace")],
)  # fmt: skip
def test_what_nvidia_smi_says_in_place_of_a_table(text, verdict):
    for one in (text, "$ nvidia-smi\n" + text, text.removesuffix("\n")):
        assert worst(judged(one).findings) == verdict


@pytest.mark.parametrize(
    ("first", "second", "count", "verdict"),
    [("|   0  NVIDIA B200                    On  |   00000000:1B:00.0 Off |                    0 |",
      "| N/A   32C    P0            142W / 1000W |       0MiB / 183359MiB |      0%      Default |", "1 x NVIDIA B200", "healthy"),
     ("|   0  Tesla V100-SXM2...  On   | 00000000:05:00.0 Off |                    0 |",
      "| N/A   51C    P0    43W / 300W |  20322MiB / 32510MiB |     97%      Default |", "1 x Tesla V100", "healthy"),
     ("|   0  NVIDIA A100-SXM...  On   | 00000000:06:00.0 Off |                 ERR! |",
      "|ERR!  ERR! ERR!    ERR! / ERR! |   GPU is lost        |     ERR!        ERR! |", "", "reset")],
)  # fmt: skip
def test_tables_of_other_drivers(first, second, count, verdict):
    text = SMI_TABLE[: SMI_TABLE.index("|   0")] + f"{first}\n{second}\n" + SMI_TABLE[SMI_TABLE.rindex("\n\n+") :]
    found = judged(text).findings
    assert worst(found) == verdict and any(count in one.message for one in found), found


@given(st.integers(0, SMI_TABLE.rindex("No running")))
def test_a_table_of_nvidia_smi_that_is_cut_is_never_healthy(end):
    assert worst(judged(SMI_TABLE[:end]).findings) is not Verdict.HEALTHY


def test_the_xml_of_nvidia_smi_is_the_same_report():
    assert only(smi_xml(), "gpu").message == "2 x NVIDIA H100 80GB HBM3, driver 570.124.06: nothing found"
    assert only(OTHER + smi_xml().replace("\n", "\r\n"), "gpu").verdict is Verdict.HEALTHY
    for name, value, verdict in (
        ("remapped_row_pending", "Yes", "reset"), ("remapped_row_failure", "Yes", "replace"), ("dram_uncorrectable", "2", "reset"),
        ("clocks_event_reason_hw_thermal_slowdown", "Active", "drain"), ("current_mig", "Enabled", "note"),
        ("current_link_width", "8x", "drain"), ("gpu_recovery_action", "Reset", "reset"), ("fabric_state", "In Progress", "drain"),
        ("row_remapper_histogram_none", "1 bank(s)", "replace"), ("gpu_temp_tlimit", "2 C", "note"), ("uuid", "ERR!", "reset"),
    ):  # fmt: skip
        found = judged(smi_xml(**{name: value})).findings
        assert worst(found) == verdict and {one.gpu for one in found} == {1}, (name, found)
    for end in range(0, len(smi_xml()) - 20, 97):
        assert worst(judged(smi_xml()[:end]).findings) is not Verdict.HEALTHY
    assert (
        worst(judged(smi_xml().replace("<nvidia_smi_log>", "<!DOCTYPE a [<!ENTITY b 'c'>]><nvidia_smi_log>")).findings)
        == "incomplete"
    )


# ---------------------------------------------------------------- DCGM

DIAGS = [
    (DIAG_TABLE, "healthy", None), (DIAG_OLD, "healthy", None), (json.dumps(diag_json()), "healthy", None),
    (json.dumps(diag_json(), indent=3), "healthy", None),
    (DIAG_TABLE.replace("GPU1: Pass ", "GPU1: Fail ", 1), "drain", 1),
    (DIAG_OLD.replace("Pass - All ", "Fail - GPU: 3"), "drain", 3),
    (DIAG_OLD.replace("| Persistence Mode          | Pass", "| Persistence Mode          | Fail"), "note", None),
    (json.dumps(diag_json(status="Fail", severity=2, warning="GPU 1 has a fault")), "drain", 1),
    (json.dumps(diag_json(status="Fail", severity=6, warning="Drain the GPU and reset it")), "reset", 1),
    (json.dumps(diag_json(status="Fail", severity=1, warning="Monitor")), "note", 1),
    (json.dumps(diag_json(old=True, status="Fail", warning="Pending page retirements")), "drain", 1),
    (json.dumps({"DCGM Diagnostic": {"runtime_error": "The host engine is not running"}}), "incomplete", None),
    ("Error: Unable to complete diagnostic for group 2147483647. Return: (-21) Host engine connection invalid\n", "incomplete", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "verdict", "gpu"), DIAGS)
def test_dcgmi_diag(text, verdict, gpu):
    for one in (text, OTHER + text, text.rstrip("\n"), text.replace("\n", "\r\n"), text + "\n" + OTHER):
        found = judged(one).findings
        assert worst(found) == verdict, found
        assert gpu is None or {each.gpu for each in found if each.verdict == verdict} == {gpu}


HEALTHS = [
    (HEALTH_TABLE.format("Healthy", ""), "healthy", ""),
    (json.dumps(health_json()), "healthy", ""),
    (json.dumps(health_json("Failure", "Detected 3 NVLink errors on GPU 1")), "drain", "3 NVLink errors"),
    (json.dumps(health_json("Warning", "Monitor the NVLink")), "note", "Monitor the NVLink"),
    ("Error: Health watches not enabled. Please enable watches. \n", "incomplete", "watches not enabled"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "verdict", "word"), HEALTHS)
def test_dcgmi_health(text, verdict, word):
    for one in (text, OTHER + text, text.rstrip("\n"), text.replace("\n", "\r\n")):
        found = judged(one).findings
        assert worst(found) == verdict and any(word in each.message for each in found)


def test_a_failed_test_of_one_gpu_is_told_once_with_its_warning():
    rows = "| memory                    | Fail                                           |\n|                           | GPU0: Pass                                     |\n|                           | GPU1: Fail                                     |\n| Warning: GPU1             | GPU 1 uncorrectable error; Drain the GPU and   |\n|                           | reset it or reboot the node.                   |\n"
    start = DIAG_TABLE.index("| memory")
    text = DIAG_TABLE[:start] + rows + DIAG_TABLE[DIAG_TABLE.index("| pulse_test") :]
    (found,) = judged(text).findings
    assert (found.verdict, found.gpu) == (Verdict.RESET, 1) and "reset it or reboot" in found.message
    plain = {
        "DCGM GPU Diagnostic": {
            "test_categories": [
                {
                    "category": "Hardware",
                    "tests": [
                        {
                            "name": "Memory",
                            "results": [{"gpu_ids": "3", "status": "Fail", "warnings": ["page retired"]}],
                        }
                    ],
                }
            ]
        }
    }
    (found,) = judged(json.dumps(plain)).findings
    assert (found.verdict, found.gpu) == (Verdict.DRAIN, 3) and "page retired" in found.message


def test_the_table_of_dcgmi_health_goes_on_over_lines():
    rows = (
        "| GPU                       |                                                          |\n"
        "| -> 1                      | Failure                                                  |\n"
        "|    -> Errors              |                                                          |\n"
        "|       -> NVLINK system    | Failure                                                  |\n"
        "|                           | GPU 1's NVLink link 3 is currently down Run a field      |\n"
        "|                           | diagnostic on the GPU.                                   |\n"
    )
    found = judged(HEALTH_TABLE.format("Failure", rows)).findings
    (one,) = [each for each in found if each.gpu is not None and "NVLINK" in each.message]
    assert one.verdict is Verdict.DRAIN and one.gpu == 1 and "down Run a field diagnostic on the GPU." in one.message


@given(
    st.sampled_from([DIAG_TABLE, DIAG_OLD, HEALTH_TABLE.format("Healthy", ""), json.dumps(diag_json(), indent=1)]),
    st.data(),
)
def test_what_dcgm_says_is_never_healthy_where_it_is_cut(text, data):
    end = data.draw(st.integers(0, len(text.rstrip()) - 2))
    assert worst(judged(text[:end]).findings) is not Verdict.HEALTHY


# ---------------------------------------------------------------- fabric manager

FABRIC = "[Jul 23 2026 07:53:{:02}] [{}] [tid 841] {}\n"
START = FABRIC.format(
    0, "INFO", "Fabric Manager version 535.161.08 is running with the following configuration options"
)
DONE = FABRIC.format(
    9, "INFO", "Successfully configured all the available GPUs and NVSwitches to route NVLink traffic."
)
FABRICS = [
    (FABRIC.format(1, "ERROR", "detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 33"), "reset", "20034"),
    (FABRIC.format(1, "ERROR", "detected NVSwitch fatal error 23001 on fid 0 on NVSwitch pci bus id 00000000:86:00.0"), "replace", "23001"),
    (FABRIC.format(1, "ERROR", "detected NVSwitch non-fatal error 12028 on fid 0 on NVSwitch pci bus id 00000000:86:00.0"), "note", "12028"),
    (FABRIC.format(1, "ERROR", "failed to find the GPU handle 5410063385821516767 in the multicast team request setup 61."), "drain", "left the NVLink fabric"),
    (FABRIC.format(1, "ERROR", "detected number of NVSwitches don't match with any supported system topology, aborting fabric manager"), "replace", "missing"),
    ("Nov 15 14:15:47 h nv-fabricmanager[4177]: request to query NVSwitch device information from NVSwitch driver failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]\n", "note", "no NVSwitch"),
    (DONE, "healthy", "nothing is wrong"), (START + DONE, "healthy", "nothing is wrong"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "verdict", "word"), FABRICS)
def test_the_log_of_the_fabric_manager(text, verdict, word):
    for one in (
        text,
        START + text,
        OTHER + text,
        text.replace("\n", "\r\n"),
        *([text.rstrip("\n")] if verdict != "healthy" else ()),
    ):
        found = only(one, "fabric_manager")
        assert found.verdict == verdict and word in found.message, one
    if verdict != "healthy":
        twice = only(text + text, "fabric_manager")
        assert twice.verdict == verdict and "2 times" in twice.message


def test_errors_before_the_fabric_managers_newest_start_are_over():
    restarted = "Fabric Manager version is : 535.161.08\n"
    assert only(FABRICS[0][0] + restarted + DONE, "fabric_manager").verdict is Verdict.HEALTHY


# ---------------------------------------------------------------- ports, collectives


def ibstat(ports=9, **changed):
    return "".join(
        f"CA 'mlx5_{number}'\n\tCA type: MT4129\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n"
        "\t\tRate: 400\n\t\tLink layer: InfiniBand\n" for number in range(ports)
    )  # fmt: skip


@pytest.mark.parametrize(
    "line",
    ["ibpanic: [1323906] main: stat of IB device 'mlx5_9' failed: No such file or directory",
     "ibpanic: [7851] main: stat of IB device 'mlx5_1' failed: Invalid argument",
     "ibwarn: [7851] main: stat of IB device 'mlx5_1' failed: Invalid argument"],
)  # fmt: skip
def test_nine_good_ports_and_a_panic_of_ibstat_are_not_healthy(line):
    for text in (
        ibstat() + line + "\n",
        ibstat() + line,
        line + "\n" + ibstat(),
        (ibstat() + line).replace("\n", "\r\n"),
        line + "\n",
    ):
        found = only(text, "net.port")
        assert found.verdict is Verdict.INCOMPLETE and "stat of IB device" in found.message
    assert only(ibstat(), "net.port").verdict is Verdict.HEALTHY


def test_a_report_of_ports_that_lacks_any_line_is_incomplete_and_condemns_no_host():
    lines = ibstat(4).splitlines(keepends=True)
    for at in range(len(lines)):
        found = judged("".join(lines[:at] + lines[at + 1 :])).findings
        assert not any(one.verdict.faulty for one in found), (lines[at], found)
        assert worst(found) is not Verdict.HEALTHY or lines[at].strip() in (
            "CA type: MT4129",
            "Rate: 400",
            "CA 'mlx5_0'",
        )


def test_ibstatus():
    text = "".join(
        f"Infiniband device 'mlx5_{number}' port 1 status:\n\tdefault gid:\t fe80::1\n\tstate:\t\t {state}\n\tphys state:\t {physical}\n"
        "\trate:\t\t 400 Gb/sec (4X NDR)\n\tlink_layer:\t InfiniBand\n\n"
        for number, (state, physical) in enumerate([("4: ACTIVE", "5: LinkUp")] * 7 + [("1: DOWN", "3: Disabled")])
    )
    found = only(text, "net.port")
    assert found.verdict is Verdict.REPLACE and "mlx5_7/1 is down" in found.message


@pytest.mark.parametrize(
    ("name", "given"),
    [("all_reduce", ("sum", "-1", 1.75, "0")), ("all_gather", ("none", "-1", 0.875, "0")), ("alltoall", ("none", "-1", 0.875, "N/A")),
     ("reduce_scatter", ("sum", "-1", 0.875, "0")), ("broadcast", ("none", "0", 1.0, "0")), ("reduce", ("sum", "0", 1.0, "0")),
     ("sendrecv", ("sum", "-1", 1.0, "N/A")), ("gather or scatter", ("none", "0", 0.875, "0"))],
)  # fmt: skip
def test_collectives_of_nccl_tests_are_told_from_their_figures(name, given):
    text = nccl_table(*given)
    for one in (text, text.rstrip("\n"), OTHER + text, text.replace("\n", "\r\n")):
        assert only(one, "net.busbw").message.startswith(f"{name} of 16 MiB on 8 GPUs")
    assert only(f"$ ./build/alltoall_perf -b 8 -e 16M -g 8\n{text}", "net.busbw").message.startswith("alltoall of")
    assert only("# Collective test starting: hypercube_perf\n" + text, "net.busbw").message.startswith("hypercube of")


# ---------------------------------------------------------------- all together


def test_everything_in_one_file_is_judged():
    text = (
        OTHER
        + SMI_TABLE
        + "\n"
        + ibstat()
        + BOOT
        + "[ 9.0] Kernel panic - not syncing: x\n"
        + DIAG_TABLE
        + FABRICS[0][0]
    )
    found = judged(text)
    assert found.kinds == {"capture-0": "nvidia-smi, dcgmi, ibstat, fabric manager, kernel log"}
    assert {one.check for one in found.findings} >= {"gpu", "gpu.dcgm", "net.port", "fabric_manager", "host.kernel"}


def test_the_last_line_without_a_newline_counts():
    xid = "[ 9.0] NVRM: Xid (PCI:0000:9b:00): 79, pid=7, name=python, GPU has fallen off the bus."
    assert worst(judged(BOOT + xid).findings) is Verdict.REPLACE
    assert worst(judged(BOOT + xid[: xid.index("79") + 2]).findings) is Verdict.INCOMPLETE, "it might be 790"


HEALTHY = (SMI_TABLE, smi_xml(), DIAG_TABLE, DIAG_OLD, json.dumps(diag_json(), indent=3), HEALTH_TABLE.format("Healthy", ""),
           START + DONE, ibstat(), nccl_table("sum", "-1", 1.75, "0"), BOOT)  # fmt: skip


def variation(text, chance):
    """Cut, mixed, with another end of lines, another host, spaces, or lines left out."""
    kind = chance.randrange(7)
    lines = text.splitlines(keepends=True)
    if kind == 0:
        return text[: chance.randrange(len(text))]
    if kind == 1:
        return text.replace("\n", "\r\n")
    if kind == 2:
        return text.rstrip("\n")
    if kind == 3:
        at = chance.randrange(len(lines) + 1)
        return OTHER * (at == 0) + text + OTHER
    if kind == 4:
        return "".join(f"{line.rstrip()}{' ' * chance.randrange(3)}\n" for line in lines)
    if kind == 5:
        del lines[chance.randrange(len(lines))]
        return "".join(lines)
    return re.sub(r"\bnode-\d+\b", "gpu_node.7-a.example", text) + "\n" * chance.randrange(3)


@pytest.mark.parametrize("seed", range(200))
def test_no_variation_of_what_is_healthy_condemns_a_host(seed):
    chance = random.Random(seed)
    text = variation(chance.choice(HEALTHY), chance)
    found = judged(text).findings
    assert not any(one.verdict.faulty for one in found), (text, found)


RECORDED = (
    "gpu_health/pkg_nvidia-query__nvidia-smi-query.535.154.05.out.0.valid",
    "gpu_health/pkg_nvidia-query_infiniband__ibstat.47.0.h100.all.active.0",
    "gpu_health/pkg_nvidia-query_infiniband__ibstat.47.0.h100.some.down.0", "nccl/nccl_allgather.log",
    "nccl/nccl_allreduce.log",
)  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_no_variation_of_a_recorded_healthy_capture_condemns_a_host(name):
    text = capture(name)
    assert not any(one.verdict.faulty for one in judged(text).findings)
    for seed in range(40):
        changed = variation(text, random.Random(seed))
        found = [one for one in judged(changed).findings if one.verdict.faulty]
        assert not found, (seed, found)


@settings(deadline=None)
@given(st.sampled_from(HEALTHY), st.text(), st.data())
def test_no_text_raises(text, other, data):
    at = data.draw(st.integers(0, len(text)))
    judged(text[:at] + other + text[at:], other)


def test_a_port_that_was_never_up_is_not_missed():
    line = "Nov 29 10:00:00 node kernel: mlx5_core 0000:5c:00.0: Port: 1 Link DOWN\n"
    assert [each.verdict for each in judged(line).findings if each.check == "net.link"] in ([], [Verdict.NOTE])
