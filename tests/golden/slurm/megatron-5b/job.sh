#!/bin/bash
#SBATCH --job-name=muster-llama-20260822-101500-1a2b
#SBATCH --comment='muster run llama-20260822-101500-1a2b'
#SBATCH --chdir=/home/me/.muster/runs/llama-20260822-101500-1a2b
#SBATCH --output=logs/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gres=gpu:8
#SBATCH --time=0-02:00:00
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=B:USR1@180

export MUSTER_RUN_ID=llama-20260822-101500-1a2b
export MUSTER_RUN_DIR=/home/me/.muster/runs/llama-20260822-101500-1a2b
export TRITON_CACHE_DIR=/tmp/llama-20260822-101500-1a2b/triton
export MUSTER_TERM=ignored
exec /home/me/muster/.venv/bin/python -P -m muster.backends.slurm.batch --run-dir /home/me/.muster/runs/llama-20260822-101500-1a2b --run-id llama-20260822-101500-1a2b
