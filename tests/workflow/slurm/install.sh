#!/usr/bin/env bash
# Packages of a single-node SLURM with accounting, on Debian or Ubuntu, as root. Does nothing where they are there.
set -euo pipefail
command -v slurmctld slurmd slurmdbd munged mariadbd > /dev/null && exit 0
export DEBIAN_FRONTEND=noninteractive
# No daemon may start by itself: start.sh starts them with a configuration of their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
packages=(slurm-wlm slurm-wlm-basic-plugins slurmdbd munge mariadb-server)
# Another test may be installing its own.
apt=(apt-get -qq -o DPkg::Lock::Timeout=600)
"${apt[@]}" install -y --no-install-recommends "${packages[@]}" > /dev/null \
    || { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${packages[@]}" > /dev/null; }
