#!/usr/bin/env bash
# Makes the virtual environments of the tools that the benchmarks compare Muster with, outside the repository:
#   $MUSTER_BENCH_HOME (default ~/.cache/muster/bench)/peers-<name>
# Usage: benchmarks/peers/setup.sh [trl] [torchft] [nvrx]     (default: all three; an existing one is kept)
# PYTHON=python3.11 chooses the interpreter; TORCH=torch==2.13.0 the torch (the same one that Muster runs on).
set -euo pipefail

home="${MUSTER_BENCH_HOME:-$HOME/.cache/muster/bench}"
python="${PYTHON:-python3}"
torch="${TORCH:-torch==2.13.0}"
mkdir -p "$home"

make_environment() { # name, packages...
  local folder="$home/peers-$1"
  shift
  if [ -e "$folder/ready" ]; then
    echo "$folder: already there"
    return
  fi
  echo "$folder: installing $torch $*"
  "$python" -m venv --clear "$folder"
  # torch first and alone: resolved together with others, pip may take a build that pulls CUDA's wheels.
  "$folder/bin/pip" install --quiet --disable-pip-version-check "$torch" numpy
  "$folder/bin/pip" install --quiet --disable-pip-version-check "$torch" "$@"
  # Stale or missing .pyc files made a peer look three times slower than it is.
  "$folder/bin/python" -m compileall -q -j 2 "$folder/lib" >/dev/null || true
  "$folder/bin/pip" freeze >"$folder/versions.txt"
  touch "$folder/ready"
}

for name in "${@:-trl torchft nvrx}"; do
  for one in $name; do
    case "$one" in
      trl) make_environment trl trl==1.16.0 datasets transformers==5.23.0 ;;
      torchft) make_environment torchft torchft-nightly ;;
      nvrx) make_environment nvrx nvidia-resiliency-ext==0.4.1 ;;
      *)
        echo "unknown environment: $one (trl, torchft, nvrx)" >&2
        exit 2
        ;;
    esac
  done
done
