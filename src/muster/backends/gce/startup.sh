#!/bin/bash
# Makes a machine of Compute Engine a host or the supervisor of a Muster run: "startup-script" in its metadata.
#
# It runs as root at every boot, without a home, an input or a time limit, and nothing shows its exit code: so each step
# may be done twice or be cut off anywhere, and what is reached is written to the run's bucket, as
# HOME/machines/NAME/BOOT.STAGE with a line of text: seconds since 1970, and words. It ends once the program is started;
# systemd keeps that alive.
# Stages: booted, driver, bundle, started; or failed, with the reason. (The program adds: checked.)
# Metadata (all muster-*): role, run, home, bundle (its name is its SHA-256), files and submission, token-secret, gpus,
# secrets. The program reads the others.
set -u
umask 022
META=http://169.254.169.254/computeMetadata/v1/instance
PLACE=/opt/muster
DRIVER_S=900    # an image that installs its driver at the first boot takes minutes
BUNDLE_S=900
PROGRAM=muster.backends.gce.host
STORAGE=https://storage.googleapis.com

meta() { # KEY: its value; refused connections and 503 are normal while a machine boots
  local left=60 code
  while :; do
    code=$(curl -sS -o "$WORK/meta" -w '%{http_code}' --max-time 10 -H 'Metadata-Flavor: Google' "$META/$1" 2>/dev/null) || code=000
    case $code in
      200) cat "$WORK/meta"; return 0 ;;
      404) return 1 ;;
    esac
    left=$((left - 1)); [ "$left" -gt 0 ] || return 1
    sleep 1
  done
}

quoted() { # a path as one part of an address
  local text=$1 out='' at char
  for ((at = 0; at < ${#text}; at++)); do
    char=${text:at:1}
    case $char in [a-zA-Z0-9.~_-]) out+=$char ;; *) out+=$(printf '%%%02X' "'$char") ;; esac
  done
  printf '%s' "$out"
}

bearer() { # the header with a fresh token, in a file: a program's arguments can be read by everybody
  local token
  token=$(meta service-accounts/default/token | sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p') || return 1
  [ -n "$token" ] || return 1
  (umask 077; printf 'Authorization: Bearer %s\n' "$token" >"$WORK/bearer")
}

tell() { # STAGE TEXT
  local bucket path
  printf 'muster: %s: %s\n' "$1" "$2"
  bucket=${HOME_URI#gs://}; bucket=${bucket%%/*}
  path="${HOME_URI#gs://"$bucket"/}/machines/$NAME/$BOOT.$1"
  bearer && printf '%s %s\n' "$(date +%s)" "$2" >"$WORK/text" &&
    curl -sS -f -o /dev/null --max-time 30 --retry 5 -X POST -H @"$WORK/bearer" -H 'Content-Type: text/plain' \
      --data-binary @"$WORK/text" "$STORAGE/upload/storage/v1/b/$bucket/o?uploadType=media&name=$(quoted "$path")"
}

fail() { tell failed "$1"; exit 1; }

driver() { # waits until the driver shows every GPU; it may be installed by now, and fails at first
  local wanted=$1 end=$((SECONDS + DRIVER_S)) seen=0
  [ "$wanted" -gt 0 ] || return 0
  while [ "$SECONDS" -lt "$end" ]; do
    seen=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || true
    [ "$seen" -ge "$wanted" ] && return 0
    sleep 5
  done
  fail "the driver shows $seen of $wanted GPUs after $DRIVER_S s"
}

local_disks() { # raw after every start on another host; the run goes on without them
  local disks=() mount=/mnt/muster target
  for target in /dev/disk/by-id/google-local-nvme-ssd-*; do
    case $target in *-part*) ;; *) [ -e "$target" ] && disks+=("$target") ;; esac
  done
  [ "${#disks[@]}" -gt 0 ] || return 0
  mountpoint -q "$mount" && return 0
  target=${disks[0]}
  if [ "${#disks[@]}" -gt 1 ]; then
    target=/dev/md/muster
    [ -e "$target" ] || mdadm --create "$target" --run --level=0 --raid-devices="${#disks[@]}" "${disks[@]}" || return 1
  fi
  mkdir -p "$mount"
  mount -o discard,nobarrier "$target" "$mount" 2>/dev/null ||
    { mkfs.ext4 -q -F -m 0 "$target" && mount -o discard "$target" "$mount"; }
}

bundle() { # gs://BUCKET/FOLDER/SHA256.tar.gz: fetched, compared with its name, unpacked and installed, whole or not
  local uri=$1 sum name bucket path end=$((SECONDS + BUNDLE_S)) found python
  name=${uri##*/}; sum=${name%.tar.gz}
  bucket=${uri#gs://}; bucket=${bucket%%/*}; path=${uri#gs://"$bucket"/}
  SOFTWARE=$PLACE/$sum
  [ -e "$SOFTWARE/ready" ] && return 0
  while :; do
    bearer && curl -sS -f --max-time 600 -H @"$WORK/bearer" -o "$WORK/bundle" \
      "$STORAGE/storage/v1/b/$bucket/o/$(quoted "$path")?alt=media" && break
    [ "$SECONDS" -lt "$end" ] || fail "$uri could not be read within $BUNDLE_S s"
    sleep 5
  done
  found=$(sha256sum <"$WORK/bundle" | cut -d ' ' -f 1)
  [ "$found" = "$sum" ] || fail "$uri is not what its name says: its SHA-256 is $found"
  rm -rf "$SOFTWARE.new"
  mkdir -p "$SOFTWARE.new"
  tar -xzf "$WORK/bundle" -C "$SOFTWARE.new" --no-same-owner || fail "$uri cannot be unpacked"
  rm -f "$WORK/bundle"
  python=$(python_in "$SOFTWARE.new") || fail "no Python 3.11 or newer, neither in the bundle nor on the image"
  # pip's own wheel runs as it is: the image may have none. Into a folder of its own, so that the image's packages
  # (torch) stay visible.
  set -- "$SOFTWARE.new"/wheels/pip-*.whl
  [ -e "$1" ] || fail "the bundle has no wheel of pip"
  "$python" "$1/pip" install --quiet --no-input --disable-pip-version-check --no-index --no-compile --no-deps \
    --require-hashes --find-links "$SOFTWARE.new/wheels" --target "$SOFTWARE.new/site" \
    -r "$SOFTWARE.new/requirements.txt" >"$WORK/pip" 2>&1 ||
    fail "the bundle cannot be installed: $(tail -n 1 "$WORK/pip")"
  PYTHONPATH=$SOFTWARE.new/site "$python" -c "import $PROGRAM, google.cloud.storage" >"$WORK/pip" 2>&1 ||
    fail "the bundle lacks something: $(tail -n 1 "$WORK/pip")"
  touch "$SOFTWARE.new/ready"
  rm -rf "$SOFTWARE"
  mv "$SOFTWARE.new" "$SOFTWARE" || fail "$SOFTWARE cannot be made"
}

python_in() { # FOLDER: a Python that is new enough
  local one
  for one in "$1/python/bin/python3" python3.13 python3.12 python3.11 python3; do
    if "$one" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then command -v "$one"; return 0; fi
  done
  return 1
}

start() { # ROLE PYTHON: systemd keeps it alive; started at each boot, after the steps above
  local words=("$2" -P -m "$PROGRAM" --role "$1")
  cat >/etc/systemd/system/muster.service.new <<UNIT
[Unit]
Description=Muster, $1 of a run
StartLimitIntervalSec=0
[Service]
Environment=PYTHONPATH=$SOFTWARE/site PYTHONUNBUFFERED=1
ExecStart=${words[*]}
Restart=on-failure
RestartSec=2
KillMode=mixed
TimeoutStopSec=110
OOMPolicy=continue
LimitNOFILE=1048576
LimitMEMLOCK=infinity
UNIT
  mv /etc/systemd/system/muster.service.new /etc/systemd/system/muster.service
  systemctl daemon-reload && systemctl restart muster.service || fail "systemd does not start muster.service"
}

WORK=$(mktemp -d) || exit 1
trap 'rm -rf "$WORK"' EXIT
NAME=$(meta name) && ROLE=$(meta attributes/muster-role) && HOME_URI=$(meta attributes/muster-home) &&
  BUNDLE=$(meta attributes/muster-bundle) || { echo 'muster: the metadata of this machine is not a run'\''s'; exit 1; }
GPUS=$(meta attributes/muster-gpus) || GPUS=0
BOOT=$(cat /proc/sys/kernel/random/boot_id)
tell booted "as $ROLE"
driver "$GPUS"
tell driver "$GPUS GPUs"
local_disks || echo 'muster: the local SSDs cannot be used; the boot disk is'
bundle "$BUNDLE"
PYTHON=$(python_in "$SOFTWARE") || fail "no Python 3.11 or newer"
tell bundle "$("$PYTHON" -V)"
start "$ROLE" "$PYTHON"
tell started muster.service
