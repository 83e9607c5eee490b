#!/usr/bin/env bash
# Keeps a Kubernetes control plane for the live tests: FOLDER/bin has its programs, compiled once (compile.sh: minutes)
# and again when the recipe changes. usage: build.sh [FOLDER]          build it there unless a usable one is there
#                                           build.sh --check [FOLDER]  say in one line whether one is; exit code 0 or 1
# FOLDER: default $MUSTER_KUBE, else ${XDG_CACHE_HOME:-~/.cache}/muster/kube. Two at once build one: the second waits.
set -euo pipefail
PROGRAMS=(etcd kube-apiserver kube-controller-manager kube-scheduler)
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
COMPILE=${MUSTER_KUBE_COMPILE:-$HERE/compile.sh}
check=
[ "${1:-}" = --check ] && { check=yes; shift; }
FOLDER=$(realpath -m "${1:-${MUSTER_KUBE:-${XDG_CACHE_HOME:-$HOME/.cache}/muster/kube}}")
# What the programs are made from: the recipe names the sources' versions, the machine its own kind.
KEY=$( (uname -m; cat "$COMPILE") | sha256sum | cut -c1-16)

sizes() { (cd "$1" && stat -L -c '%n %s' "${PROGRAMS[@]}"); }
trouble() {  # what keeps the programs from being used; nothing where they can be
  [ -e "$FOLDER/bin" ] || { echo "nobody built one"; return; }
  [ -e "$FOLDER/bin/stamp" ] || { echo "it was never finished"; return; }
  [ "$(head -n 1 "$FOLDER/bin/stamp")" = "$KEY" ] || { echo "it is of another recipe"; return; }
  [ "$(tail -n +2 "$FOLDER/bin/stamp")" = "$(sizes "$FOLDER/bin" 2>/dev/null)" ] || { echo "its programs are not whole"; return; }
}

found=$(trouble)
if [ -n "$check" ]; then
  [ -z "$found" ] && { echo "a control plane is in $FOLDER"; exit 0; }
  echo "no control plane in $FOLDER: $found; tests/live/kube/build.sh builds one (minutes, once)"
  exit 1
fi
[ -z "$found" ] && exit 0

mkdir -p "$FOLDER"
exec 9> "$FOLDER/.lock"
flock 9
[ -z "$(trouble)" ] && exit 0  # somebody else was faster
# Beside: what is used is whole or not there. The half-made one stays where this is interrupted, to be gone on with.
half=$FOLDER/.half-$KEY
mkdir -p "$half"
"$COMPILE" "$half" 9>&-
{ echo "$KEY"; sizes "$half/bin"; } > "$half/bin/stamp"
rm -rf "$FOLDER/$KEY"
mv "$half" "$FOLDER/$KEY"
ln -sfn "$KEY/bin" "$FOLDER/.bin"
[ -x "$FOLDER/bin/kube-apiserver" ] && [ ! -L "$FOLDER/bin" ] && rm -rf "$FOLDER/bin"  # an older layout
mv -T "$FOLDER/.bin" "$FOLDER/bin"
# Of another recipe; nothing but what is clearly ours, whatever folder was named.
for old in "$FOLDER"/????????????????/bin/stamp; do
  case $old in "$FOLDER/$KEY/bin/stamp") ;; *) [ -e "$old" ] && rm -rf "${old%/bin/stamp}" ;; esac
done
rm -rf "$FOLDER"/.half-*
