#!/bin/bash
set -e
update-initramfs -u -k all
