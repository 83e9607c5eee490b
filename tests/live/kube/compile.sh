#!/usr/bin/env bash
# Compiles a real Kubernetes control plane (API server, controllers, scheduler, etcd; 1.20.2) into OUT/bin from Debian
# bookworm's own source package with Debian's Go 1.19. usage: compile.sh OUT; build.sh is what calls it, and keeps OUT.
# Measured on two cores: 4 to 20 minutes, 480 CPU seconds, 1.4 GB of memory, 2.5 GB of disk while it builds, 300 MB
# kept. Nothing is installed. An interrupted one is gone on with: what was downloaded and compiled lies in OUT/work.
set -euo pipefail
OUT=$(realpath -m "${1:?usage: compile.sh OUT}")
BIN=$OUT/bin
WORK=$OUT/work
PROGRAMS=(kube-apiserver kube-controller-manager kube-scheduler)

mkdir -p "$BIN" "$WORK"/apt/{lists/partial,cache/archives/partial,parts} "$WORK"/{go,deb,gp/src/k8s.io/kubernetes}
cd "$WORK"

# The machine's own Debian sources, as deb-src, in a list of our own.
for file in /etc/apt/sources.list.d/*.sources; do
  [ -e "$file" ] && sed 's/^Types:.*/Types: deb-src/' "$file" > "apt/parts/$(basename "$file")"
done
[ -s /etc/apt/sources.list ] && sed -n 's/^deb /deb-src /p' /etc/apt/sources.list > apt/parts/more.list
APT=(-oDir::Etc::sourcelist=/dev/null "-oDir::Etc::sourceparts=$WORK/apt/parts" "-oDir::State::Lists=$WORK/apt/lists"
  "-oDir::Cache=$WORK/apt/cache" -oAPT::Sandbox::User=root)
if ! ls kubernetes_*.orig.tar.* >/dev/null 2>&1; then
  apt-get -qq "${APT[@]}" update || true
  apt-get -qq "${APT[@]}" source --download-only kubernetes=1.20.5+really1.20.2-1.1 2>/dev/null ||
    apt-get -qq "${APT[@]}" source --download-only kubernetes
fi
ls golang-1.19-go_*.deb >/dev/null 2>&1 ||
  apt-get -qq -oAPT::Sandbox::User=root download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server
rm -rf go deb gp/src/k8s.io/kubernetes  # what an interrupted run left
mkdir -p go deb gp/src/k8s.io/kubernetes
for package in golang-1.19*.deb; do dpkg -x "$package" go; done
dpkg -x golang-github-modern-go-reflect2-dev*.deb deb
dpkg -x etcd-server_*.deb deb
cp deb/usr/bin/etcd "$BIN/"
sha256sum kubernetes_*.orig.tar.* ./*.deb > "$BIN/sources"

SOURCE=$WORK/gp/src/k8s.io/kubernetes
tar xzf kubernetes_*.orig.tar.gz -C "$SOURCE" --strip-components=1
cd "$SOURCE"
[ -d vendor ] && [ -d cmd/kube-apiserver ] || { echo "this Debian's kubernetes source has no control plane: bookworm's has" >&2; exit 1; }
# The vendored reflect2 1.0.1 crashes with Go >= 1.18; Debian packages a newer one.
REFLECT=vendor/github.com/modern-go/reflect2
rm -f $REFLECT/*.go $REFLECT/*.s
cp "$WORK"/deb/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} $REFLECT/
rm -f $REFLECT/*_test.go
sed -i 's/gitVersion   = .*/gitVersion   = "v1.20.2"/; s/^\tgitMajor string .*/\tgitMajor string = "1"/; s/^\tgitMinor string .*/\tgitMinor string = "20"/' \
  staging/src/k8s.io/component-base/version/base.go staging/src/k8s.io/client-go/pkg/version/base.go

export GOROOT=$WORK/go/usr/lib/go-1.19 GOPATH=$WORK/gp GOCACHE=$WORK/cache GO111MODULE=off GOPROXY=off GOFLAGS= CGO_ENABLED=0
PATH=$GOROOT/bin:$PATH
go build -o "$WORK/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
# Server-side apply of built-in kinds needs the generated definitions, which the source package leaves out.
FOLDERS=$(grep -rl '+k8s:openapi-gen=' --include=*.go cmd pkg plugin \
  staging/src/k8s.io/{api,apimachinery,apiserver,client-go,component-base,kube-aggregator,apiextensions-apiserver,metrics,cloud-provider,controller-manager,kube-controller-manager,kube-proxy,kube-scheduler,kubelet,csi-translation-lib} |
  grep -v _test.go | xargs -n1 dirname | sort -u |
  sed 's#^staging/src/#k8s.io/kubernetes/vendor/#; /^k8s.io/!s#^#k8s.io/kubernetes/#' | paste -sd,)
"$WORK/openapi-gen" -O zz_generated.openapi --go-header-file hack/boilerplate/boilerplate.generatego.txt -i "$FOLDERS" \
  -p k8s.io/kubernetes/pkg/generated/openapi --output-base "$WORK/gp/src" -r "$WORK/violations.txt" >"$WORK/openapi.log" 2>&1
go build -ldflags '-s -w' -o "$BIN/" "${PROGRAMS[@]/#/./cmd/}"
cd "$OUT"
chmod -R u+w "$WORK"
rm -rf "$WORK"
