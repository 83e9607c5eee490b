#!/bin/bash
set -e
apt-get update
apt-get install -y python@python@ python@python@-venv git
