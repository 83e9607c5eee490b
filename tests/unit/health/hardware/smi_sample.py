"""``nvidia-smi -q`` as drivers 535 and 570 print it: the fields that are judged, and some beside them."""

OLD = "535"
NEW = "570"

_BLOCK = """\
GPU {address}
    Product Name                          : NVIDIA H100 80GB HBM3
    Persistence Mode                      : Enabled
    Addressing Mode                       : None
    MIG Mode
        Current                           : Disabled
        Pending                           : Disabled
    Serial Number                         : 165012403159{number}
    GPU UUID                              : GPU-ee7954ec-da95-fd7a-ddfd-c6b32cc2f8a{number}
    VBIOS Version                         : 96.00.74.00.0D
    GPU Reset Status
        Reset Required                    : {reset}
        Drain and Reset Recommended       : {reset}
{action}    PCI
        Bus Id                            : {address}
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 5
            Link Width
                Max                       : 16x
                Current                   : 16x
        Replays Since Reset               : 0
    Fan Speed                             : N/A
    {reasons}
        Idle                              : Active
        SW Power Cap                      : Not Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : Not Active
            HW Power Brake Slowdown       : Not Active
        Sync Boost                        : Not Active
        SW Thermal Slowdown               : Not Active
{counters}    FB Memory Usage
        Total                             : 81559 MiB
        Used                              : 551 MiB
    Compute Mode                          : Default
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 0
{sram}            DRAM Correctable              : 0
            DRAM Uncorrectable            : 0
        Aggregate
            SRAM Correctable              : 0
{sram}            DRAM Correctable              : 0
            DRAM Uncorrectable            : 0
            SRAM Threshold Exceeded       : No
    Retired Pages
        Single Bit ECC                    : N/A
        Double Bit ECC                    : N/A
        Pending Page Blacklist            : N/A
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 0
        Pending                           : No
        Remapping Failure Occurred        : No
        Bank Remap Availability Histogram
            Max                           : 2560 bank(s)
            High                          : 0 bank(s)
            Partial                       : 0 bank(s)
            Low                           : 0 bank(s)
            None                          : 0 bank(s)
    Temperature
        GPU Current Temp                  : 29 C
        GPU T.Limit Temp                  : 56 C
        GPU Slowdown T.Limit Temp         : -2 C
    GPU Power Readings
        Power Draw                        : 69.45 W
    Fabric
        State                             : Completed
        Status                            : Success
    Processes                             : None

"""

_OLD = {
    "reset": "No",
    "action": "",
    "reasons": "Clocks Throttle Reasons",
    "counters": "",
    "sram": "            SRAM Uncorrectable            : 0\n",
}
_NEW = {
    "reset": "Requested functionality has been deprecated",
    "action": "    GPU Recovery Action                   : None\n",
    "reasons": "Clocks Event Reasons",
    "counters": "    Clocks Event Reasons Counters\n        SW Thermal Slowdown               : 11591399010 us\n",
    "sram": "            SRAM Uncorrectable Parity     : 0\n            SRAM Uncorrectable SEC-DED    : 0\n",
}


def report(driver: str = OLD, gpus: int = 2) -> str:
    head = (
        "\n==============NVSMI LOG==============\n\n"
        "Timestamp                                 : Wed Jul 31 11:22:39 2024\n"
        f"Driver Version                            : {driver}.161.08\n"
        "CUDA Version                              : 12.2\n\n"
        f"Attached GPUs                             : {gpus}\n"
    )
    fields = _OLD if driver == OLD else _NEW
    return head + "".join(
        _BLOCK.format(address=f"00000000:{0x19 + number:02X}:00.0", number=number, **fields) for number in range(gpus)
    )


def with_value(text: str, name: str, value: str, *, gpu: int = 0) -> str:
    """The report with the field ``name`` of one GPU changed; ``name`` may be ``Section: Field``."""
    head, *blocks = text.split("\nGPU 0000")
    section, _, field = name.rpartition(": ")
    lines, inside, done = blocks[gpu].split("\n"), not section, False
    for number, line in enumerate(lines):
        inside = inside or line.strip() == section
        if inside and not done and line.partition(":")[0].strip() == field:
            lines[number] = line.partition(":")[0] + ": " + value
            done = True
    assert done, name
    blocks[gpu] = "\n".join(lines)
    return "\nGPU 0000".join([head, *blocks])
