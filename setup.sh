#!/usr/bin/env bash
# Sets up Muster in .venv and runs it:
#   ./setup.sh run [RUN.yaml [key.path=value ...]]   trains; default examples/text2sql-cpu.yaml
#   ./setup.sh check [--since REV] [pytest arguments]  lint, types, figures, and the unit tests that the change can affect
#   ./setup.sh check --all [pytest arguments]        with every unit test: 7 minutes on two cores
#   ./setup.sh check --why TEST_FILE                 how that test depends on what changed
#   ./setup.sh test [pytest arguments]               every kind of test, live ones for each capability: 10 minutes
#   ./setup.sh test all [pytest arguments]           everything that CI runs
#   ./setup.sh nightly [pytest arguments]            what CI leaves out: hours
#   ./setup.sh gpu-check [torch versions]            the trainer's unit tests on CUDA builds of torch, no GPU; 5 GB each
#   ./setup.sh docs                                  the documentation as a site, every link checked: .cache/docs-site
#   ./setup.sh install [extras]                      only installs; default what every command here needs
# Needs Python 3.11 or newer, and git to have cloned this. Variables:
#   MUSTER_PYTHON   the Python to use
#   MUSTER_VENV     the folder of the environment; default .venv here
#   MUSTER_TORCH    pip's arguments for torch, to override the choice made here,
#                   for example "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"
#   MUSTER_WORKERS  how many tests run at a time; default 2
set -euo pipefail
cd "$(dirname "$0")"

VENV=${MUSTER_VENV:-.venv}
CPU_INDEX=https://download.pytorch.org/whl/cpu
TORCH=$(grep -E '^torch==' constraints.txt)

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 2; }

find_python() {
  local name
  for name in ${MUSTER_PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  die "no Python 3.11 or newer" "sudo apt-get install python3 python3-venv, or set MUSTER_PYTHON"
}

# Debian and Ubuntu split ensurepip off into python3-venv; pip of the system can stand in for it.
make_venv() {
  [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
  local python
  python=$(find_python)
  say "making $VENV with $("$python" --version)"
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv --clear "$VENV"
  elif "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear --without-pip "$VENV"
    "$python" -m pip --python "$VENV/bin/python" install --quiet pip
  else
    die "this Python cannot make virtual environments" "sudo apt-get install python3-venv"
  fi
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# Which torch? With an NVIDIA GPU the index's own build. Without one the CPU build: the index's own where that
# is a CPU build (it asks for no CUDA packages), else PyTorch's CPU index: the CUDA build is gigabytes larger. Where that
# index cannot be reached, the CUDA build after all: it runs on the CPU too.
torch_arguments() {
  if [ -n "${MUSTER_TORCH:-}" ]; then
    echo "$MUSTER_TORCH"
  elif nvidia-smi -L 2>/dev/null | grep -q GPU || [ "$(uname -s)" != Linux ]; then
    echo "$TORCH"
  elif index_torch_is_cpu; then
    echo "$TORCH"
  elif cpu_index_answers; then
    echo "$TORCH --index-url $CPU_INDEX"
  else
    say "$CPU_INDEX does not answer: taking $TORCH of the usual package index, a CUDA build of several GB (MUSTER_TORCH overrides)"
    echo "$TORCH"
  fi
}

# One short try. An installation makes six, with pauses: 85 s where the index cannot be reached.
cpu_index_answers() {
  PIP_FIND_LINKS='' pip index versions torch --index-url "$CPU_INDEX" --retries 0 --timeout 10 >/dev/null 2>&1
}

index_torch_is_cpu() {
  local report
  report=$(mktemp)
  if ! pip install --quiet --dry-run --no-deps --ignore-installed --report "$report" "$TORCH" >/dev/null 2>&1; then
    rm -f "$report"
    return 1
  fi
  "$VENV/bin/python" - "$report" <<'PY'
import json, sys
wheel = json.load(open(sys.argv[1]))["install"][0]
needs = " ".join(wheel["metadata"].get("requires_dist", [])).lower()
cuda = "nvidia-" in needs or "cuda-" in needs
sys.exit(cuda and "cpu" not in wheel["metadata"]["version"])
PY
  local code=$?
  rm -f "$report"
  return $code
}

# What an extra brings besides itself.
with_implied() {
  local extra
  for extra in ${1//,/ }; do
    case $extra in
      all) echo "all train data gcs s3" ;;
      dev) echo "dev test" ;;
      gke-test) echo "gke-test gke" ;;
      *) echo "$extra" ;;
    esac
  done | tr ' ' '\n'
}

install() {
  local extras=$1 stamp lock=requirements/all.lock  # the stamp lists what is installed
  make_venv
  stamp=$VENV/.muster-$(cat pyproject.toml constraints.txt requirements/*.lock | cksum | cut -d' ' -f1)
  [ -e "$stamp" ] && ! grep -qvxFf "$stamp" <(with_implied "$extras") && return
  case $extras in train | data | train,data) lock=requirements/run.lock ;; esac
  say "installing muster[$extras] and what $lock names"
  pip install --quiet --no-deps --require-hashes -r "$lock"  # a file with another SHA-256 ends it
  if ! "$VENV/bin/python" -c "import torch" 2>/dev/null; then
    local arguments
    arguments=$(torch_arguments)
    say "installing $arguments"  # after the lock: pip checks no hash of what is there already
    # shellcheck disable=SC2086  (several arguments)
    pip install --quiet $arguments
  fi
  pip install --quiet --no-deps --no-build-isolation -e .    # built by the lock's setuptools
  with_implied "$extras" >>"$stamp"
}

# A later -m or -n in the arguments overrides what is given here. Tests share the cores: threads of torch's that spin
# while they wait for each other (OpenMP's default) keep the others from running, and two tests took twice as long.
tests() {
  local marks=$1
  shift
  OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} "$VENV/bin/python" -m pytest -m "$marks" -n "${MUSTER_WORKERS:-2}" --dist loadfile "$@"
}

check() {
  OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} "$VENV/bin/python" -m tests.plugin.check "$@"
}

# CUDA builds of torch on a machine without a driver: what imports, forks, kernels' signatures and NCCL's names come to.
# Every version has an environment of its own beside the usual one. `===`: no local CPU build is taken for it.
gpu_check() {
  local main=$VENV version code=0
  [ $# -gt 0 ] || set -- 2.11.0 2.12.0 2.13.0
  for version in "$@"; do
    VENV=$main-cuda-$version
    make_venv
    if ! [ -e "$VENV/.muster-complete" ]; then
      say "installing the CUDA build of torch $version in $VENV"
      local arguments="torch===$version"
      pip install --quiet --no-deps --require-hashes -r requirements/all.lock
      pip install --quiet "$arguments"
      touch "$VENV/.muster-complete"
    fi
    "$VENV/bin/python" -c "import torch; assert torch.version.cuda, f'{torch.__version__} is no CUDA build'" || { code=1; continue; }
    say "torch $version, CUDA build: unit tests of train and rank"
    PYTHONPATH=src "$VENV/bin/python" -m pytest -q -p no:cacheprovider tests/unit/train tests/unit/rank || code=1
  done
  return $code
}

mode=${1:-}
[ $# -gt 0 ] && shift
case $mode in
  run)
    install train,data
    [ $# -gt 0 ] || set -- examples/text2sql-cpu.yaml
    exec "$VENV/bin/muster" train "$@"
    ;;
  check)
    install all,dev
    check "$@"
    ;;
  test)
    install all,test
    export MUSTER_SECOND_TRY=${MUSTER_SECOND_TRY:-/dev/null}  # a live test that fails is run once more, alone, at the end
    marks="not soak and not slow and (core or not live)"
    case ${1:-} in
      all) marks="not soak"; shift ;;
      *tests/*) marks="not soak" ;;  # what is named runs, whatever its size
    esac
    tests "$marks" "$@"
    ;;
  nightly)
    install all,test
    MUSTER_WORKERS=1 tests soak "$@"
    [ $# -gt 0 ] || MUSTER_THOROUGH=1 tests "not soak" tests/unit
    ;;
  gpu-check)
    gpu_check "$@"
    ;;
  docs)
    make_venv
    "$VENV/bin/python" tools/docs_site.py
    ;;
  install)
    install "${1:-all,gke,inspect,otlp,sweep}"
    say "done: $VENV/bin/muster"
    ;;
  *)
    sed -n '2,20s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
