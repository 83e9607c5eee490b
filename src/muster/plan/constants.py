"""The few numbers of the time model, each with its origin."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The few numbers that ``calibrate`` fits; defaults are stated with their origin in docs/explanation/plan.md."""

    efficiency: float = 0.87
    """Share of the measured matmul ceiling that matrices reach: the middle of what this trainer's two traces on one GPU
    say (8B LoRA 0.81, 1B 0.93). docs/explanation/plan.md compares with published runs."""
    attention_efficiency: float = 0.89
    """Share of its kernel's published rate that attention reaches: one traced run on one H100 (1B, heads of 64,
    documents of 4,096 tokens: 197 TFLOP/s where the table gives 221)."""
    overlap: float = 0.8
    """Share of arithmetic during which FSDP's collectives can run hidden."""
    device_to_host_bytes_per_s: float = 20e9
    """Snapshots and staged checkpoints leave the GPU at this rate: PCIe 5 into pinned memory, which the trainer's rings
    are from a run's first snapshots on (modelled, for all GPUs of a host at once; one H100 alone was seen at 55e9).
    Into pageable memory, where CUDA refuses to register a ring and the rank's log says so, it is a few GB/s
    (estimated): plans do not count on that."""
    checksum_bytes_per_s: float = 10e9
    """A rank's thread that makes a snapshot count (one H100 host, measured)."""
    copies_beside: bool = True
    """Snapshots are copied during the next step's forward and backward passes (GPUs)."""
    store_bytes_per_s_per_node: float = 1e9
    """A machine's rate to and from a bucket (modelled)."""
    host_s_per_layer: float = 0.6e-3
    """Python and launch time of a layer's forward and backward; compiled half of it (modelled)."""
    split_matrix_s: float = 0.0
    """A rank's time around each matrix that tensor parallel splits, in a round, without its all-reduce's bytes. On a
    GPU kernels hide it."""
    precision: str = "bf16"


DEFAULT = Constants()
#: Ranks on a CPU move their bytes with the cores that compute: nothing is hidden. A split matrix: 14 operations through
#: DTensor and autograd around it 1.2 ms, copies for all-reduces 0.7 ms, gloo's latency 0.3 ms (two ranks on two
#: shared cores, taken apart on a busy machine and scaled to a quiet one by one rank: benchmarks/RESULTS.md).
ON_CPU = Constants(efficiency=0.65, overlap=0.0, copies_beside=False, split_matrix_s=2.2e-3)
#: Tokens of a document at which a kernel reaches half of its rate at long ones: within 6 % for Flash Attention 2 at 1k
#: to 16k tokens in the source of the table.
ATTENTION_HALF_TOKENS = 300
#: An fp8 operand is read twice and written once or twice (its largest value first, then the cast and its transpose); an
#: mxfp8 one is read and written once for each of the two directions that its scales run in.
FP8_CAST_BYTES = 6.0
#: Share of the measured fp8 ceiling that scaled matrices of a layer reach, relative to bf16's share of its own: NeMo's
#: 8B in fp8 against bf16 gives it (a row that is therefore fitted on, not checked).
#: Of mxfp8 nothing is published that it could be fitted to: the same.
FP8_SHARE = 0.93
#: Bytes that a token moves through memory in a layer's forward pass, in units of (h, a + k, i) elements of 2 bytes:
#: separate kernels, float32 norms counted double; and fused. The backward pass moves twice as much.
TRAFFIC = {False: (52.0, 20.0, 10.0), True: (14.0, 8.0, 6.0)}
#: Of separate kernels in a family with LayerNorm (a kernel of its own) and without rotation or gate.
LAYER_NORM_TRAFFIC = (20.0, 8.0, 10.0)
#: What a hidden collective takes of the arithmetic that hides it: NCCL runs in 16 to 32 of an H100's 132 processors,
#: and moves its bytes through the same memory.
COLLECTIVE_SHARE = 0.2
#: A step waits for its slowest rank: the share by which it grows with each doubling of the machines. torchtitan's 8B
#: from 1 to 16 machines 0.6 %; llm-foundry's 13B from 2 to 16 0.4 %, 7B from 4 to 16 1.4 %, 1B from 2 to 8 1.8 %.
WAITING_SHARE = 0.005
#: Of a kernel's rate, what attention reaches under context parallel, whose pieces take a mask: torchtitan's 8B at 64k,
#: 128k and 256k tokens (cp 2, 4, 8) leaves 1.04, 0.72 and 0.70 of flash2's.
CONTEXT_SHARE = 0.82
#: A TPU multiplies in bfloat16: a float32 product of the highest precision is six of them. From memory, unchecked.
FLOAT32_PASSES = 6
