#!/bin/bash
set -e
ROOT=/opt/apps/adm/slurm
mkdir -m 0755 -p "$ROOT/scripts" "$ROOT/partition-@partition@-prolog_slurmd.d" \
  "$ROOT/partition-@partition@-epilog_slurmd.d"
# A node whose GPUs fail their test after a job is drained.
ln -sf /slurm/scripts/tools/gpu-test "$ROOT/partition-@partition@-epilog_slurmd.d/gpu-test.epilog_slurmd"
