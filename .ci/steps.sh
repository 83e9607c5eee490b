# Steps with limits, for `.ci/run`: whatever hangs is killed, and the summary is printed.
# The caller has set WORK, a new folder, which is deleted at the end.

SUMMARY=()
FAILED=0
RUNNING=
export CI_STEP=$WORK/step          # what a step starts is known by this variable, whatever session it is in
: "${CI_MINUTE_S:=60}"             # less in tests
: "${CI_MINUTES:=85}"              # for all steps together: who started us may wait no longer than 90

# step MINUTES NAME COMMAND...: runs it, notes how long it took and how it ended. Over its time, or that of all steps,
# it is interrupted, so that pytest tells what has failed so far; a minute later all that it started is killed.
step() {
  local limit_s=$(($1 * CI_MINUTE_S)) name=$2 began=$SECONDS code=0 how=ok left_s
  shift 2
  left_s=$((CI_MINUTES * CI_MINUTE_S - SECONDS))
  [ $left_s -ge $limit_s ] || limit_s=$((left_s > CI_MINUTE_S ? left_s : CI_MINUTE_S))
  printf '\nci: %s\n' "$name"
  # In the background: a signal that this shell gets is then handled at once, not when the step has ended.
  timeout --signal=INT --kill-after=$CI_MINUTE_S $limit_s bash -uo pipefail -c '"$@"' step "$@" &
  RUNNING=$!
  wait $RUNNING || code=$?
  RUNNING=
  case $code in
    0) ;;
    124 | 137) how="TIMED OUT"; printf 'ci: %s: over its time, %d s\n' "$name" $limit_s; end_all "$CI_STEP" ;;
    *) how=FAILED ;;
  esac
  note $began "$how" "$name"
}

note() {
  local took=$((SECONDS - $1))
  SUMMARY+=("$(printf '%3d:%02d  %-9s %s' $((took / 60)) $((took % 60)) "$2" "$3")")
  [ "$2" = ok ] || FAILED=1
}

# end_all STEP...: kills what these started and left. Twice: one may have started another meanwhile.
end_all() {
  local round file name
  for round in 1 2; do
    for file in /proc/[0-9]*/environ; do
      for name in "$@"; do
        grep -qzxF "CI_STEP=$name" "$file" 2>/dev/null || continue
        file=${file%/environ}
        kill -KILL "${file#/proc/}" 2>/dev/null || true
        break
      done
    done
  done
}

# Ends the step that runs, where a signal ended this shell, and prints the summary.
finish() {
  local code=$?
  trap '' INT TERM HUP
  set +e
  if [ -n "$RUNNING" ]; then
    FAILED=1
    kill -INT "$RUNNING" 2>/dev/null
    for ((code = 0; code < CI_MINUTE_S / 6; code++)); do kill -0 "$RUNNING" 2>/dev/null || break; sleep 1; done
    SUMMARY+=("        STOPPED   while this ran")
  elif [ $code != 0 ]; then
    FAILED=1
  fi
  end_all "$CI_STEP" "$CI_STEP.build"
  if [ -s "${MUSTER_SECOND_TRY:-}" ]; then
    printf '\nci: TESTS THAT FAILED AT LEAST ONCE, with the end of the first failure (all of it is above):\n'
    cat "$MUSTER_SECOND_TRY"
  fi
  if [ -s "${MUSTER_TIMES:-}" ]; then
    printf '\nci: what tests cost (%s):\n' "$MUSTER_TIMES"
    .venv/bin/python -m tests.plugin.times "$MUSTER_TIMES" || true
  fi
  printf '\nci: %d minutes, of 45 at most\n' $((SECONDS / 60))
  printf 'ci: %s\n' "${SUMMARY[@]}"
  rm -rf "$WORK"
  exit $FAILED
}

trap finish EXIT
trap 'exit 1' INT TERM HUP
