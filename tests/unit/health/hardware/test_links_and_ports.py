"""RDMA ports, NVLinks, the fabric manager and the tables of nccl-tests."""

import pytest
from hardware_captures import ALL_GATHER, ALL_REDUCE, IBSTAT_ACTIVE, IBSTAT_DOWN, capture
from hypothesis import example, given
from hypothesis import strategies as st

from muster.health.hardware.fabric_manager import judge_fabric_manager
from muster.health.hardware.infiniband import (
    files_of_listing,
    is_ibstat,
    is_sysfs,
    judge_counters,
    judge_ports,
    read_ibstat,
    read_sysfs,
)
from muster.health.hardware.nccl_tests import is_nccl_tests, judge_nccl_tests, read_nccl_tests
from muster.health.hardware.nvlink import is_nvlink, judge_links, read_nvlink
from muster.health.verdicts import Verdict, worst

# ---------------------------------------------------------------- ports


def ibstat(*states, kind="MT4129"):
    """One adapter with one port for each (state, physical state, rate)."""
    return "".join(
        f"CA 'mlx5_{number}'\n\tCA type: {kind}\n\tNumber of ports: 1\n\tFirmware version: 28.39.1002\n\tPort 1:\n"
        f"\t\tState: {state}\n\t\tPhysical state: {physical}\n\t\tRate: {rate}\n\t\tBase lid: 75\n"
        "\t\tLink layer: InfiniBand\n"
        for number, (state, physical, rate) in enumerate(states)
    )


UP, DOWN, SLOW = ("Active", "LinkUp", 400), ("Down", "Polling", 10), ("Active", "LinkUp", 200)


def ports(text, **more):
    return judge_ports(read_ibstat(text), **more)


def test_ports_that_work():
    (found,) = ports(ibstat(*[UP] * 8), expected=8, rate=400)
    assert found.verdict is Verdict.HEALTHY and found.message == "8 ports work (8 at 400 Gbit/s)"
    assert is_ibstat(ibstat(UP)) and not is_ibstat("CA: none")


@pytest.mark.parametrize("bad", [DOWN, SLOW, ("Initializing", "LinkUp", 400), ("Down", "Disabled", 40)])
def test_fewer_than_the_machines_row_says(bad):
    (found,) = ports(ibstat(*[UP] * 7, bad), expected=8, rate=400)
    assert found.verdict is Verdict.REPLACE and "7 of 8 ports work" in found.message and "mlx5_7" in found.evidence


def test_without_a_row_a_port_is_compared_with_its_like():
    assert worst(ports(ibstat(*[UP] * 7, DOWN))) is Verdict.REPLACE
    assert worst(ports(ibstat(*[UP] * 7, SLOW))) is Verdict.DRAIN
    assert worst(ports(ibstat(UP, DOWN))) is Verdict.NOTE, "the second port of an adapter often has no cable"
    assert worst(ports(ibstat(UP, *[DOWN] * 7))) is Verdict.INCOMPLETE, "most are down: nobody knows what should be up"
    assert worst(ports(ibstat(*[UP] * 8) + ibstat(DOWN, kind="MT4125"))) is Verdict.NOTE


def test_machines_without_such_ports():
    assert worst(judge_ports(read_sysfs({}), expected=0)) is Verdict.HEALTHY
    assert worst(judge_ports(read_sysfs({}), expected=8)) is Verdict.REPLACE


WHOLE = ibstat(UP, UP, UP)


@given(st.integers(0, len(WHOLE) - 2))
def test_ibstat_that_is_cut_inside_an_adapter_is_never_healthy(end):
    text = WHOLE[:end]
    if end and WHOLE[end:].startswith(("\nCA '", "CA '")):
        assert worst(ports(text, expected=3)) is not Verdict.HEALTHY  # only the number that is expected can tell
    else:
        assert worst(ports(text)) is not Verdict.HEALTHY


@given(st.text(), st.integers(0, len(WHOLE)))
def test_no_text_raises_in_ibstat(text, at):
    ports(WHOLE[:at] + text + WHOLE[at:])
    judge_ports(read_sysfs(files_of_listing("/sys/class/infiniband/mlx5_0/ports/1/state:" + text)))


def listing(**changed):
    base = "/sys/class/infiniband/mlx5_0/"
    files = {"hca_type": "MT4129", "ports/1/state": "4: ACTIVE", "ports/1/phys_state": "5: LinkUp",
             "ports/1/rate": "400 Gb/sec (4X NDR)", "ports/1/link_layer": "InfiniBand",
             "ports/1/counters/link_downed": "2", "ports/1/counters/symbol_error": "0",
             "ports/1/hw_counters/np_cnp_sent": "77", "ports/1/hw_counters/packet_seq_err": "5"}  # fmt: skip
    return {base + name: value for name, value in (files | changed).items()}


def test_sysfs():
    text = "".join(f"{path}:{value}\n" for path, value in listing().items())
    assert is_sysfs(text) and files_of_listing(text) == listing()
    (port,) = read_sysfs(listing()).ports
    assert (port.name, port.kind, port.state, port.physical, port.rate) == (
        "mlx5_0/1",
        "MT4129",
        "Active",
        "LinkUp",
        400,
    )
    assert port.up and not read_sysfs(listing(**{"ports/1/state": "1: DOWN"})).ports[0].up
    partial = {path: value for path, value in listing().items() if not path.endswith("rate")}
    assert worst(judge_ports(read_sysfs(partial))) is Verdict.INCOMPLETE


def test_counters_that_grow():
    assert not judge_counters(listing(), listing(), seconds=5)
    congested = listing(**{"ports/1/hw_counters/np_cnp_sent": "99999"})
    assert not judge_counters(listing(), congested, seconds=5), "congestion is no fault"
    (found,) = judge_counters(listing(), listing(**{"ports/1/counters/link_downed": "3"}), seconds=5)
    assert found.verdict is Verdict.DRAIN and "mlx5_0/1 lost its link 1 time in 5.0 s" in found.message
    (found,) = judge_counters(listing(), listing(**{"ports/1/hw_counters/packet_seq_err": "9"}), seconds=5)
    assert "packet_seq_err" in found.message and found.value == "4" and found.verdict is Verdict.DRAIN


def test_beside_a_run_only_what_congestion_does_not_do_costs_a_host():
    def verdict(name):
        (found,) = judge_counters(
            listing(**{f"ports/1/{name}": "1"}), listing(**{f"ports/1/{name}": "9"}), seconds=1, idle=False
        )
        return found.verdict

    assert verdict("hw_counters/local_ack_timeout_err") is Verdict.NOTE
    assert verdict("counters/link_downed") is verdict("counters/symbol_error") is Verdict.DRAIN


def test_recorded_ibstats():
    """Of the second, the three storage ports are disabled; the eight of the data network work."""
    (found,) = ports(capture(IBSTAT_ACTIVE))
    assert found.message == "12 ports work (8 at 400 Gbit/s, 4 at 100 Gbit/s)"
    down = capture(IBSTAT_DOWN)
    assert [one.verdict for one in ports(down)] == [Verdict.NOTE] * 3
    assert worst(ports(down, expected=8, rate=400)) is Verdict.HEALTHY
    (found,) = ports(down, expected=12)
    assert found.verdict is Verdict.REPLACE and "9 of 12" in found.message and "mlx5_8/1 MT4125" in found.evidence


# ---------------------------------------------------------------- NVLink


def status(*gpus, name="NVIDIA H100 80GB HBM3"):
    return "".join(
        f"GPU {number}: {name} (UUID: GPU-{number})\n"
        + "".join(
            f"\t Link {link}: {'<inactive>' if speed == 0 else f'{speed:g} GB/s'}\n" for link, speed in enumerate(one)
        )
        for number, one in enumerate(gpus)
    )


FULL = [26.562] * 18


def links(text):
    return judge_links(read_nvlink(text))


def test_links():
    assert is_nvlink(status(FULL)) and not is_nvlink("GPU 0: NVIDIA L4 (UUID: GPU-0)\n")
    (found,) = links(status(FULL, FULL))
    assert found.verdict is Verdict.HEALTHY and "36 NVLinks" in found.message
    (found,) = links(status(FULL, [*FULL[:17], 0]))
    assert (found.verdict, found.gpu, found.expected) == (Verdict.REPLACE, 1, "18") and "Link 17" in found.evidence
    assert worst(links(status(FULL, [*FULL[:17], 13.281]))) is Verdict.DRAIN
    assert worst(links(status([*FULL[:17], 0], [*FULL[:17], 0]))) is Verdict.REPLACE, "the row knows 18"
    (found,) = links(status([0] * 18, [0] * 18))
    assert found.verdict is Verdict.DRAIN and "no NVLink is active" in found.message


def test_cards_with_bridges_have_fewer_links_by_design():
    bridged = [26.562] * 4 + [0, 0]
    assert worst(links(status(bridged, bridged, name="NVIDIA H100 PCIe"))) is Verdict.HEALTHY
    assert worst(links(status(bridged, [26.562] * 3 + [0] * 3, name="NVIDIA H100 PCIe"))) is Verdict.REPLACE
    assert worst(links(status([0] * 18))) is Verdict.HEALTHY, "one GPU alone needs none"


def errors(count):
    return "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\n" + "".join(
        f"\t Link {link}: {kind} Errors: {count if (link, kind) == (1, 'CRC') else 0}\n"
        for link in range(2)
        for kind in ("Replay", "Recovery", "CRC")
    )


def test_errors_so_far_are_noted():
    assert worst(links(errors(0))) is Verdict.HEALTHY and worst(links(errors(7))) is Verdict.NOTE


LINKS = status(FULL, FULL, FULL)


@given(st.integers(0, len(LINKS) - 2))
@example(LINKS.index("\n") + 1)  # the first GPU's name alone
def test_link_states_that_are_cut_are_never_healthy(end):
    if not end or not LINKS[end:].startswith(("GPU ", "\nGPU ")):
        assert worst(links(LINKS[:end])) is not Verdict.HEALTHY


@given(st.text(), st.integers(0, len(LINKS)))
def test_no_text_raises_in_nvlink(text, at):
    links(LINKS[:at] + text + LINKS[at:])


# ---------------------------------------------------------------- fabric manager

SERVICE = (
    "● nvidia-fabricmanager.service - NVIDIA fabric manager service\n     Loaded: loaded (/lib/systemd/x)\n"
    "     Active: active (running) since Mon 2026-02-23 16:24:18 UTC; 3 days ago\n   Main PID: 7 (nv-fabricmanage)\n"
    "Feb 23 16:24:18 a nv-fabricmanager[7]: Fabric Manager version is : 535.161.08\n"
)


def test_fabric_manager():
    assert worst(judge_fabric_manager(SERVICE, driver="535.161.08")) is Verdict.HEALTHY
    (wrong,) = judge_fabric_manager(SERVICE, driver="535.183.01")
    assert wrong.verdict is Verdict.DRAIN and "535.161.08" in wrong.message and "535.183.01" in wrong.message
    stopped = SERVICE.replace("active (running)", "failed (Result: exit-code)")
    assert worst(judge_fabric_manager(stopped)) is Verdict.DRAIN
    none = "Unit nvidia-fabricmanager.service could not be found.\n"
    assert worst(judge_fabric_manager(none)) is Verdict.NOTE


@given(st.integers(0, SERVICE.index("since")))
def test_a_status_that_is_cut_is_never_healthy(end):
    assert worst(judge_fabric_manager(SERVICE[:end])) is not Verdict.HEALTHY


# ---------------------------------------------------------------- nccl-tests

NEW = """\
# Collective test starting: reduce_scatter_perf
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  71201 on     node-1 device  0 [0000:19:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  71202 on     node-2 device  0 [0000:19:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
node-1:71201:71240 [0] NCCL INFO Launch mode Parallel
     1048576        131072     float     sum      -1    29.61   35.41   17.71      0    29.54   35.49   17.75      0
     2097152        262144     float     sum      -1    31.02   67.61   33.80      0    30.95   67.76   33.88      0
     4194304        524288     float     sum      -1    40.00  104.86   52.43      0    39.80  105.38   52.69      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 34.7085
#
"""  # noqa: E501


def test_tables_of_newer_nccl_tests():
    table = read_nccl_tests(NEW)
    assert is_nccl_tests(NEW) and table.collective == "reduce_scatter" and not table.missing
    assert (table.gpus, table.hosts, table.device) == (2, ("node-1", "node-2"), "NVIDIA H100 80GB HBM3")
    assert [row.size_bytes for row in table.rows] == [1 << 20, 2 << 20, 4 << 20] and table.wrong_values == 0
    assert table.largest.busbw == 52.43 and table.largest.busbw_in_place == 52.69
    assert read_nccl_tests(NEW.partition("\n")[2]).collective == "reduce_scatter", "told from its figures"
    (found,) = judge_nccl_tests(table)
    assert found.verdict is Verdict.HEALTHY and "4 MiB on 2 GPUs: bus bandwidth 52.43 GB/s" in found.message


def test_wrong_values_are_silent_corruption():
    bad = NEW.replace("52.43      0", "52.43     12").replace("values : 0 OK", "values : 12 FAILED")
    found = judge_nccl_tests(read_nccl_tests(bad))
    assert worst(found) is Verdict.REPLACE and "12 wrong values in reduce_scatter" in found[0].message


def test_a_test_that_failed_says_nothing_of_the_network():
    failed = NEW.partition("# Out of")[0] + "node-2: Test NCCL failure all_reduce.cu:44 'unhandled system error'\n"
    found = judge_nccl_tests(read_nccl_tests(failed))
    assert worst(found) is Verdict.INCOMPLETE and "unhandled system error" in found[0].evidence


def test_a_table_of_messages_without_bytes_names_no_collective():
    lines = [line for line in NEW.splitlines(keepends=True) if "2097152" not in line and "starting" not in line]
    text = "".join(lines).replace("     1048576 ", "           0 ").replace("     4194304 ", "           0 ")
    table = read_nccl_tests(text.replace("maxBytes 4194304", "maxBytes 0"))
    assert table.largest.size_bytes == 0 and table.collective == ""


def test_results_that_were_not_checked_are_said():
    (found,) = judge_nccl_tests(
        read_nccl_tests(
            NEW.replace("validation: 1", "validation: 0")
            .replace("      0 ", "    N/A ")
            .replace("      0\n", "    N/A\n")
        )
    )
    assert found.verdict is Verdict.HEALTHY and "results not checked" in found.message


@given(st.integers(0, NEW.index("# Avg") + 10))
def test_a_table_that_is_cut_is_never_healthy(end):
    assert worst(judge_nccl_tests(read_nccl_tests(NEW[:end]))) is not Verdict.HEALTHY


@given(st.text(), st.integers(0, len(NEW)))
def test_no_text_raises_in_nccl_tests(text, at):
    judge_nccl_tests(read_nccl_tests(NEW[:at] + text + NEW[at:]))


@pytest.mark.parametrize(
    ("name", "collective", "busbw"), [(ALL_GATHER, "all_gather", 223.39), (ALL_REDUCE, "all_reduce", 235.26)]
)
def test_recorded_tables(name, collective, busbw):
    table = read_nccl_tests(capture(name))
    assert (table.collective, table.gpus, table.device, table.missing) == (collective, 8, "A100-SXM4-40GB", "")
    assert table.largest.size_bytes == 8 << 30 and table.largest.busbw == busbw
    assert "not checked" in judge_nccl_tests(table)[0].message
