# ruff: noqa: E501
"""More of what machines print, by kind: forms, versions and prefixes that ``test_captures`` has not.

Written from the public formats: systemd, slurmd, journalctl, crash(8), DCGM 1 to 4, drivers 450 to 580.
"""

import json

import pytest
from fakes.captures import SMI_TABLE
from test_captures import DONE, FABRIC, OTHER, START, judged, only

from muster.health.hang.analysis import analyse
from muster.health.hang.captures import evidence_of
from muster.health.verdicts import Verdict, worst

LINES = [
    # which process ran out of memory, in the words of kernel, systemd and Slurm
    ("[77.1] oom_reaper: reaped process 4455 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB", "app", "4455 (python3)"),
    ("[77.1] Out of memory (oom_kill_allocating_task): Killed process 31 (ray::train_fn) total-vm:1kB, anon-rss:2kB", "app", "31 (ray::train_fn)"),
    ("Nov 20 03:11:42 n7 systemd[1]: slurmstepd.scope: A process of this unit has been killed by the OOM killer.", "app", "slurmstepd.scope"),
    ("Nov 20 03:11:42 n7 systemd-oomd[1312]: Killed /user.slice/session-4.scope due to memory used (1) / total (2)", "app", "session-4.scope"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=8123.0. Some of the step tasks have been OOM Killed.", "app", "StepId=8123.0"),
    ('{"textPayload":"Memory cgroup out of memory: Killed process 3210 (python3) total-vm:81kB, anon-rss:4kB","severity":"WARNING"}', "app", "3210"),
    # nvidia-peermem
    ("modprobe: FATAL: Module nvidia-peermem not found in directory /lib/modules/5.15.0-91-generic", "note", "does not work"),
    ("modprobe: ERROR: could not insert 'nvidia_peermem': Key was rejected by service", "note", "does not work"),
    ("[Thu Nov 20 11:02:51 2025] nvidia-peermem nv_mem_get_pages:312 ERROR error -22 while calling nvidia_p2p_get_pages()", "note", "nvidia-peermem"),
    ("Nov 21 09:12:00 dgx systemd-modules-load[812]: Failed to insert module 'nvidia_peermem': Invalid argument", "note", "does not work"),
    # crashes in libraries
    ("[9.5] pt_main[77]: unhandled exception: DABT (lower EL), ESR 0x92000006, level 2 translation fault in libnccl.so.2.21.5[ffff9a000000+d000000]", "app", "libnccl.so.2.21.5"),
    ("[9.5] python[7]: unhandled level 2 translation fault (11) at 0x00000008, esr 0x92000006, in libnccl.so.2[ffff8000+1000]", "app", "at 0x00000008"),
    ("[8.8] traps: python3[4] trap invalid opcode ip:7f0a00001000 sp:7ffd0 error:0 in libnccl.so.2.26.2[7f0a00000000+2000]", "app", "at its offset 0x1000"),
    ("Nov 21 04:00:13 n12 systemd-coredump[5600]: Process 5512 (python3) of user 1000 dumped core.", "app", "process 5512 (python3)"),
    # links
    ("".join(f"[{1000 + 9 * i}.1] bond0: (slave eth2): link status definitely {('down, disabling slave', 'up')[i % 2]}\n" for i in range(6)), "drain", "3 times"),
    ("".join(f"Nov 21 11:1{i}:10 h systemd-networkd[900]: eth3: {('Lost', 'Gained')[i % 2]} carrier\n" for i in range(6)), "drain", "3 times"),
    ("[900.0] bnxt_en 0000:c1:00.0 ens1f0np0: NIC Link is Down\n[905.0] bnxt_en 0000:c1:00.0 ens1f0np0: NIC Link is Up, 200000 Mbps", "note", "once"),
    # disks
    ("[1.5] ata2.00: failed command: READ FPDMA QUEUED\n[1.5] ata2.00: error: { UNC }", "drain", "ata2.00"),
    ("[1.5] EXT4-fs (dm-0): This should not happen!! Data will be lost", "drain", "dm-0"),
    ("[1.5] nvme0n1: Read(0x2) @ LBA 1, 8 blocks, Unrecovered Read Error (sct 0x2)\n[1.5] critical medium error, dev nvme0n1, sector 12345", "drain", "nvme0n1"),
    ("[1.5] XFS (nvme2n1): Metadata corruption detected at xfs_agf_verify+0x13/0x20 [xfs], xfs_agf block 0x1", "drain", "nvme2n1"),
    # panics
    ('    NODENAME: gpu-12\n       PANIC: "Kernel panic - not syncing: Fatal hardware error!"\n         PID: 0', "replace", "Fatal hardware error!"),
    ('       PANIC: "Oops: 0000 [#1] SMP NOPTI" (check log for details)', "replace", "Oops: 0000"),
    ("[9.3] Out of memory and no killable processes...\n[9.4] Kernel panic - not syncing: System is deadlocked on memory", "replace", "deadlocked"),
    ("[  OK  ] Started nvidia-persistenced.service\n[81.3] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000009", "replace", "kill init"),
    # the driver
    ("[60.1] NVRM: The NVIDIA probe routine failed for 1 device(s).\n[60.2] NVRM: None of the NVIDIA devices were initialized.", "drain", "cannot initialize"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "verdict", "words"), LINES, ids=[row[0][:40] for row in LINES])
def test_lines_by_other_writers(text, verdict, words):
    text = text.rstrip("\n")
    for one in (text, text + "\n", text.replace("\n", "\r\n") + "\r\n", OTHER + text + "\n$ exit\n", "\ufeff" + text):
        found = [each for each in judged(one).findings if each.check != "capture"]
        assert worst(found) == verdict and any(words in each.message for each in found), (one, found)


XID = "NVRM: Xid (PCI:0000:9b:00): 79, pid=7, name=python, GPU has fallen off the bus."


@pytest.mark.parametrize(
    "before",
    ["2025 Nov 20 10:00:00 host kernel: ", "Thu Nov 20 10:00:00 2025 host kernel: ", "[12345.678901] [T1234] ", "[12345.678901]  ",
     "2025-11-20T10:00:00Z node-1 kern.err kernel: ", "gpu-node | [12345.6] ", "> [12345.6] ", "12: [12345.6] ", "     7\t[12345.6] ",
     '{"PRIORITY":"3","SYSLOG_IDENTIFIER":"kernel","MESSAGE":"', '  "MESSAGE" : "'],
)  # fmt: skip
def test_an_xid_is_seen_behind_every_prefix(before):
    """One that is not read would be a healthy log."""
    assert worst(judged(before + XID + "\n").findings) is Verdict.REPLACE


# ---------------------------------------------------------------- the table of nvidia-smi, with instances

INSTANCES = """\
+---------------------------------------------------------------------------------------+
| MIG devices:                                                                          |
+------------------+--------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |                   Memory-Usage |        Vol|      Shared           |
|      ID  ID  Dev |                     BAR1-Usage | SM     Unc| CE ENC DEC OFA JPG    |
|                  |                                |        ECC|                       |
|==================+================================+===========+=======================|
|  1    1   0   0  |             38MiB / 20096MiB   | 42      0 |  3   0   2    0    0  |
|                  |              0MiB / 32767MiB   |           |                       |
+------------------+--------------------------------+-----------+-----------------------+
|  1    2   0   1  |             38MiB / 20096MiB   | 42      0 |  3   0   2    0    0  |
|                  |              0MiB / 32767MiB   |           |                       |
+------------------+--------------------------------+-----------+-----------------------+

"""


def mig(instances):
    """The second GPU is cut into instances; its cell for errors says "On" then."""
    head, first, second = SMI_TABLE.partition("|   1 ")
    second = second.replace("                    0 |", "                   On |").replace("Disabled |", " Enabled |")
    place = second.index("+----", second.index("\n\n"))
    return head + first + second[:place] + instances + second[place:]


def test_instances_are_noted_and_their_errors_are_their_gpus():
    (found,) = judged(mig(INSTANCES)).findings
    assert (found.verdict, found.gpu, found.check) == (Verdict.NOTE, 1, "gpu.mig")
    found = judged(mig(INSTANCES.replace(" 42      0 |", " 42      4 |", 1))).findings
    assert worst(found) is Verdict.RESET and {one.gpu for one in found} == {1}


def test_a_value_of_two_words_in_the_table_is_a_field_that_cannot_be_read():
    text = SMI_TABLE.replace("             72W / 700W", "  Unknown Error / 700W")
    (found,) = judged(text).findings
    assert (found.verdict, found.gpu, found.check) == (Verdict.RESET, 1, "gpu.lost")


# ---------------------------------------------------------------- fabric manager

OLD = FABRIC.format(1, "ERROR", "detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:86:00.0")
SYSTEMD = "Nov 20 10:00:0{} dgx systemd[1]: {}\n"
FAILED = SYSTEMD.format(6, "nvidia-fabricmanager.service: Failed with result 'exit-code'.")
STARTED = SYSTEMD.format(
    8, "Starting nvidia-fabricmanager.service - NVIDIA fabric manager service..."
) + SYSTEMD.format(9, "Started nvidia-fabricmanager.service - NVIDIA fabric manager service.")
NO_SWITCH = (
    "Nov 20 10:00:05 h nv-fabricmanager[41]: request failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]\n"
)
FABRICS = [
    (FABRIC.format(4, "CRITICAL", "NVSwitch pci bus id 00000000:06:00.0 is in a failed state"), "drain"),
    (FABRIC.format(4, "WARNING", "not all NVLinks are in active state for GPU pci bus id 00000000:5B:00.0"), "note"),
    (FABRIC.format(4, "ERROR", "detected GPU fatal error on GPU pci bus id 00000000:1B:00.0"), "reset"),
    (OLD + START + DONE, "healthy"),
    (FAILED, "drain"),
    (SYSTEMD.format(7, "Failed to start NVIDIA fabric manager service."), "drain"),
    (NO_SWITCH + FAILED, "note"),
    (FAILED + STARTED + "Nov 20 10:00:09 dgx nv-fabricmanager[1120]: Connected to 1 node.\n", "healthy"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "verdict"), FABRICS)
def test_levels_starts_and_the_journal_of_the_fabric_manager(text, verdict):
    for one in (text, OTHER + text, text.replace("\n", "\r\n")):
        assert worst(judged(one).findings) == verdict, one


def test_the_version_in_its_log_is_held_against_the_drivers():
    found = judged(SMI_TABLE + START.replace("161.08", "183.01") + DONE).findings
    assert any("must be equal" in one.message and one.verdict is Verdict.DRAIN for one in found)


# ---------------------------------------------------------------- the first form of dcgmi health

HEALTH = (
    "Health Monitor Report\n"
    "+------------------+---------------------------------------------------------+\n"
    "| Overall Health:    {:<56}|\n"
    "+==================+=========================================================+\n"
)


def test_the_first_form_of_dcgmi_health():
    assert only(HEALTH.format("Healthy"), "gpu.dcgm").verdict is Verdict.HEALTHY
    rows = "| GPU ID: 1        | Warning                                                 |\n|                  | InfoROM system: Warning - A corrupt InfoROM             |\n"
    text = HEALTH.format("Warning") + rows
    assert worst(judged(text + HEALTH.splitlines()[1] + "\n").findings) is Verdict.NOTE
    assert worst(judged(text).findings) is Verdict.INCOMPLETE
    assert worst(judged(HEALTH.format("Healthy")[:-20]).findings) is Verdict.INCOMPLETE


def test_a_port_without_a_state_is_cut_and_not_down():
    text = "".join(
        f"CA 'mlx5_{n}'\n\tCA type: MT4129\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n"
        "\t\tRate: 400\n\t\tLink layer: InfiniBand\n" for n in range(8)
    )  # fmt: skip
    for end in range(len(text) - 110, len(text) - 15):
        found = judged(text[:end]).findings
        assert worst(found) is Verdict.INCOMPLETE, (text[end - 30 : end], found)


# ---------------------------------------------------------------- flight recorders of other people


def dump(called, *, last="nccl:all_reduce", indent=None):
    """Of one of four ranks: ``called`` collectives, of which four have ended, with frames as a converted pickle has."""
    entries = [
        {"collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "record_id": number, "pg_id": 0,
         "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce" if number < 5 else last,
         "is_p2p": False, "input_sizes": [[8]], "output_sizes": [[8]], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
         "state": "completed" if number < 5 else "started", "retired": number < 5, "time_created_ns": number,
         "frames": [{"name": "step", "filename": "train.py", "line": 40 + number}]}
        for number in range(1, called + 1)
    ]  # fmt: skip
    status = {"last_enqueued_collective": called, "last_started_collective": called, "last_completed_collective": 4}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return json.dumps(
        {"version": "2.10", "pg_config": config, "pg_status": {"0": status}, "entries": entries}, indent=indent
    )


NAMES = (
    "rank{}_20251120.json",
    "dump_{}_1732100000.json",
    "rank{}/trace.json",
    "node-1/nccl_trace_rank_{}",
    "fr-rank-{}.1732100000",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_is_known_by_its_files_name(name):
    files = [(name.format(rank), dump(4 if rank == 2 else 5).encode()) for rank in range(4)]
    assert [one.rank for one in analyse(evidence_of(files)).culprits] == [2]
    without = analyse(evidence_of(files[:2] + files[3:]))
    assert [(one.rank, one.confidence.value) for one in without.culprits] == [(2, "low")]


def test_windows_line_ends_and_a_byte_order_mark():
    texts = [dump(4 if rank == 1 else 5, indent=2).replace("\n", "\r\n") for rank in range(4)]
    files = [(f"dump_{rank}", b"\xef\xbb\xbf" + text.encode()) for rank, text in enumerate(texts)]
    assert [one.rank for one in analyse(evidence_of(files)).culprits] == [1]


def test_two_moments_of_one_rank_are_not_mixed():
    files = [(f"{moment}/dump_{rank}", dump(5).encode()) for moment in ("a", "b") for rank in range(4)]
    assert "another file is of rank 3" in " ".join(evidence_of(files).missing)


@pytest.mark.parametrize("name", ["broadcast", "reduce", "all_to_all", "_all_gather_base"])
def test_who_called_another_collective(name):
    files = [
        (f"dump_{rank}", dump(5, last=f"nccl:{name}" if rank == 3 else "nccl:all_reduce").encode()) for rank in range(4)
    ]
    (culprit,) = analyse(evidence_of(files)).culprits
    assert culprit.rank == 3 and culprit.operation == name and "ranks 0, 1 and 2 called all_reduce" in culprit.sentence
