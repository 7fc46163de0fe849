#!/usr/bin/env bash
# Stops what start.sh has started in the folder given.
set -uo pipefail
base=$(realpath "$1")
export SLURM_CONF="$base/slurm.conf"
scancel -u root 2> /dev/null
for daemon in slurmd slurmctld slurmdbd; do
    [ -e "$base/run/$daemon.pid" ] && kill "$(cat "$base/run/$daemon.pid")" && sleep 1
done
[ -e "$base/started_mariadb" ] && kill "$(cat /run/mysqld/mysqld.pid)"
[ -e "$base/started_munge" ] && pkill -x munged
[ "$(readlink /etc/slurm/slurm.conf)" = "$base/slurm.conf" ] && rm /etc/slurm/slurm.conf
exit 0
