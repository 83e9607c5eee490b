#!/bin/bash
# The driver of the base image stays: another one would not match the kernel module.
set -e
dpkg-query -W -f '${Package}\n' 'libnvidia-*-server' 'nvidia-*-server' 'libnvidia-nscq-*' 'nvidia-fabricmanager-*' \
  'nvidia-imex-*' 2>/dev/null | xargs -r apt-mark hold
