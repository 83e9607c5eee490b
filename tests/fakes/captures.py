# ruff: noqa: E501
"""Reports of sound machines as NVIDIA's tools print them, and with values changed."""

SMI_TABLE = """\
Mon Feb 23 16:24:18 2026
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 535.161.08             Driver Version: 535.161.08   CUDA Version: 12.2     |
|-----------------------------------------+----------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |         Memory-Usage | GPU-Util  Compute M. |
|                                         |                      |               MIG M. |
|=========================================+======================+======================|
|   0  NVIDIA H100 80GB HBM3          On  | 00000000:19:00.0 Off |                    0 |
| N/A   29C    P0              69W / 700W |      4MiB / 81559MiB |      0%      Default |
|                                         |                      |             Disabled |
+-----------------------------------------+----------------------+----------------------+
|   1  NVIDIA H100 80GB HBM3          On  | 00000000:2A:00.0 Off |                    0 |
| N/A   31C    P0              72W / 700W |      4MiB / 81559MiB |      0%      Default |
|                                         |                      |             Disabled |
+-----------------------------------------+----------------------+----------------------+

+---------------------------------------------------------------------------------------+
| Processes:                                                                            |
|  GPU   GI   CI        PID   Type   Process name                            GPU Memory |
|        ID   ID                                                             Usage      |
|=======================================================================================|
|  No running processes found                                                           |
+---------------------------------------------------------------------------------------+
"""
_GPU = """\
	<gpu id="00000000:{bus}:00.0">
		<product_name>NVIDIA H100 80GB HBM3</product_name>
		<persistence_mode>Enabled</persistence_mode>
		<mig_mode><current_mig>{current_mig}</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
		<uuid>{uuid}</uuid>
		<vbios_version>96.00.74.00.0D</vbios_version>
		<gpu_recovery_action>{gpu_recovery_action}</gpu_recovery_action>
		<pci><pci_bus_id>00000000:{bus}:00.0</pci_bus_id><pci_gpu_link_info>
			<pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
			<link_widths><max_link_width>16x</max_link_width><current_link_width>{current_link_width}</current_link_width></link_widths>
		</pci_gpu_link_info></pci>
		<clocks_event_reasons>
			<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
			<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
			<clocks_event_reason_hw_thermal_slowdown>{clocks_event_reason_hw_thermal_slowdown}</clocks_event_reason_hw_thermal_slowdown>
		</clocks_event_reasons>
		<fb_memory_usage><total>81559 MiB</total><used>1 MiB</used></fb_memory_usage>
		<compute_mode>Default</compute_mode>
		<ecc_errors><volatile><sram_correctable>0</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
			<dram_correctable>7</dram_correctable><dram_uncorrectable>{dram_uncorrectable}</dram_uncorrectable></volatile>
			<aggregate><sram_uncorrectable_parity>0</sram_uncorrectable_parity></aggregate></ecc_errors>
		<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
		<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_pending>{remapped_row_pending}</remapped_row_pending>
			<remapped_row_failure>{remapped_row_failure}</remapped_row_failure><row_remapper_histogram>
			<row_remapper_histogram_none>{row_remapper_histogram_none}</row_remapper_histogram_none></row_remapper_histogram></remapped_rows>
		<temperature><gpu_temp>29 C</gpu_temp><gpu_temp_tlimit>{gpu_temp_tlimit}</gpu_temp_tlimit></temperature>
		<fabric><state>{fabric_state}</state><status>Success</status></fabric>
		<processes></processes>
	</gpu>
"""
_SOUND = {
    "current_mig": "Disabled", "uuid": "GPU-1", "gpu_recovery_action": "None", "current_link_width": "16x",
    "clocks_event_reason_hw_thermal_slowdown": "Not Active", "dram_uncorrectable": "0", "remapped_row_pending": "No",
    "remapped_row_failure": "No", "row_remapper_histogram_none": "0 bank(s)", "gpu_temp_tlimit": "56 C",
    "fabric_state": "Completed",
}  # fmt: skip


def smi_xml(**changed):
    """``nvidia-smi -q -x`` of two GPUs; what is changed is so on the second."""
    gpus = _GPU.format(bus="19", **_SOUND) + _GPU.format(bus="2A", **_SOUND | changed)
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        "\t<driver_version>570.124.06</driver_version>\n\t<attached_gpus>2</attached_gpus>\n"
        + gpus
        + "</nvidia_smi_log>\n"
    )


def _row(name, value):
    return f"| {name:<25} | {value:<46} |\n"


_LINE = "+---------------------------+------------------------------------------------+\n"
_HEAD = (
    "Successfully ran diagnostic for group.\n" + _LINE + _row("Diagnostic", "Result")
    + "+===========================+================================================+\n"
)  # fmt: skip
DIAG_TABLE = (
    _HEAD + "|-----  Metadata  ----------+------------------------------------------------|\n" + _row("DCGM Version", "4.2.3")
    + _row("GPU Device IDs Detected", "2330, 2330") + "|-----  Deployment  --------+------------------------------------------------|\n"
    + _row("software", "Pass") + _row("", "GPU0: Pass") + _row("", "GPU1: Pass")
    + "+-----  Hardware  ----------+------------------------------------------------+\n" + _row("memory", "Pass")
    + _row("", "GPU0: Pass") + _row("", "GPU1: Pass") + _row("pulse_test", "Skip") + _LINE
)  # fmt: skip
DIAG_OLD = (
    _HEAD + "|-----  Deployment  --------+------------------------------------------------|\n" + _row("Blacklist", "Pass")
    + _row("Persistence Mode", "Pass") + _row("Page Retirement/Row Remap", "Pass")
    + "+-----  Integration  -------+------------------------------------------------+\n" + _row("PCIe", "Pass - All")
    + "+-----  Hardware  ----------+------------------------------------------------+\n" + _row("GPU Memory", "Pass - All")
    + _row("Diagnostic", "Skip - All") + _LINE
)  # fmt: skip
_WIDE = "+---------------------------+----------------------------------------------------------+\n"
HEALTH_TABLE = (
    "+---------------------------+----------------------------------------------------------+\n"
    "| Health Monitor Report                                                                |\n"
    "+===========================+==========================================================+\n"
    "| Overall Health            | {:<56} |\n{}" + _WIDE
)


def diag_json(*, old=False, status="Pass", severity=None, warning=""):
    """``dcgmi diag -r 1 -j`` of two GPUs; the second one's memory test ended with ``status``."""
    key = {"gpu_id": "1"} if old else {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 1}
    told = {"warning": warning}
    if severity is not None:
        told |= {"error_severity": severity, "error_id": 1, "error_category": 1}
    last = {**key, "status": status}
    if warning:
        last |= {"warnings": [told]} if not old else {"warning": warning}
    tests = [
        {"name": "software", "results": [{"status": "Pass"}], "test_summary": {"status": "Pass"}},
        {"name": "memory", "results": [last], "test_summary": {"status": status}},
        {"name": "pulse_test", "results": [], "test_summary": {"status": "Skip"}},
    ]
    name = "DCGM GPU Diagnostic" if old else "DCGM Diagnostic"
    return {name: {"test_categories": [{"category": "Hardware", "tests": tests}]}, "metadata": {"version": "4.2.3"}}


def health_json(status="Healthy", warning=""):
    """``dcgmi health --check --json``; the second GPU's NVLink is ``status``."""
    body = {"Overall Health": {"value": status}}
    if warning:
        errors = {"Errors": {"children": {"NVLINK system": {"value": status, "overflow": [warning]}}}}
        body["GPU"] = {"children": {"1": {"value": status, "children": errors}}}
    return {"header": ["Health Monitor Report"], "body": body}


def nccl_table(operation, root, factor, in_place_wrong):
    """nccl-tests on eight GPUs without the name of the collective; bus bandwidth is ``factor`` of size/time."""
    ranks = "".join(f"#  Rank  {n} Group  0 Pid  712 on  node-1 device  {n} [0x1{n}] NVIDIA H100\n" for n in range(8))
    rows = ""
    for size, time_us in ((8388608, 100.0), (16777216, 160.0)):
        rate = size / time_us / 1e3
        cells = f"{time_us:.2f} {rate:.2f} {rate * factor:.2f}"
        rows += f"  {size} {size // 4} float {operation} {root}  {cells} 0  {cells} {in_place_wrong}\n"
    return (
        "# nThread 1 nGpus 8 minBytes 8388608 maxBytes 16777216 step: 2(factor) warmup iters: 5 iters: 20 validation: 1\n"
        f"{ranks}#       size         count      type   redop    root     time   algbw   busbw #wrong\n{rows}"
        "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 90.0\n"
    )
