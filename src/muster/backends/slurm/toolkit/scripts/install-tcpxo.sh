#!/bin/bash
set -e -o pipefail
curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg \
  | gpg --batch --yes --dearmor -o /usr/share/keyrings/google-apt.gpg
curl -fsSL https://us-apt.pkg.dev/doc/repo-signing-key.gpg \
  | gpg --batch --yes --dearmor -o /usr/share/keyrings/google-artifacts.gpg
echo "deb [signed-by=/usr/share/keyrings/google-apt.gpg] https://packages.cloud.google.com/apt" \
  "apt-transport-artifact-registry-stable main" > /etc/apt/sources.list.d/artifact-registry.list
apt-get update
apt-get install -y apt-transport-artifact-registry
echo "deb [arch=all trusted=yes] ar+https://us-apt.pkg.dev/projects/gce-ai-infra gpudirect-tcpxo-apt main" \
  > /etc/apt/sources.list.d/gpudirect-tcpxo.list
apt-get update
apt-get install -y dkms
# The module's source as packaged does not build on kernel 6.17, which wants this name as a string.
cd /var/tmp
apt-get download dmabuf-import-helper
dpkg-deb -x dmabuf-import-helper_*.deb /var/tmp/dmabuf
cp -r /var/tmp/dmabuf/usr/src/dmabuf-import-helper-1.1 /usr/src/
sed -i 's/MODULE_IMPORT_NS(DMA_BUF)/MODULE_IMPORT_NS("DMA_BUF")/' /usr/src/dmabuf-import-helper-1.1/import-helper.c
dkms add -m dmabuf-import-helper -v 1.1
dkms build -m dmabuf-import-helper -v 1.1
dkms install -m dmabuf-import-helper -v 1.1
