#!/usr/bin/env bash
# Starts a cluster of one node on loopback: accounting, two made-up GPUs, a partition that may be preempted and one that
# preempts. Everything lives in the folder given. Commands within jobs find it by /etc/slurm/slurm.conf, since the
# executor clears SLURM_CONF; so this refuses to run on a machine that has a SLURM already.
set -euo pipefail
base=$(realpath "$1")
host=$(hostname -s)
left=$(readlink /etc/slurm/slurm.conf || true)
if [[ $left == */gripmoe-slurm-*/slurm.conf ]] && ! pgrep -x slurmctld > /dev/null; then
    rm /etc/slurm/slurm.conf # of a test that was killed
fi
if [ -e /etc/slurm/slurm.conf ]; then
    echo "this machine has a SLURM already: /etc/slurm/slurm.conf" >&2
    exit 1
fi
mkdir -p "$base"/{state,spool,log,run,db,dev}
chmod 755 "$base"

# munge: a key and a socket of its own would need its clients rebuilt, so the system's are used.
mkdir -p /run/munge /var/log/munge /var/lib/munge
chown munge: /run/munge /var/log/munge /var/lib/munge
chmod 755 /run/munge
if [ ! -e /etc/munge/munge.key ]; then
    mkdir -p /etc/munge
    dd if=/dev/urandom of=/etc/munge/munge.key bs=1 count=1024 status=none
    chown -R munge: /etc/munge
    chmod 400 /etc/munge/munge.key
fi
if ! pgrep -x munged > /dev/null; then
    runuser -u munge -- /usr/sbin/munged
    touch "$base/started_munge"
fi

for i in 0 1; do
    [ -e "$base/dev/nvidia$i" ] || mknod "$base/dev/nvidia$i" c 1 3
done
echo "NodeName=$host Name=gpu Type=h100 File=$base/dev/nvidia[0-1]" > "$base/gres.conf"
printf 'CgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n' > "$base/cgroup.conf"
memory=$(($(grep MemTotal /proc/meminfo | tr -dc 0-9) / 1024 * 9 / 10))
cat > "$base/slurm.conf" << END
ClusterName=dev
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$base/state
SlurmdSpoolDir=$base/spool
SlurmctldPidFile=$base/run/slurmctld.pid
SlurmdPidFile=$base/run/slurmd.pid
SlurmctldLogFile=$base/log/slurmctld.log
SlurmdLogFile=$base/log/slurmd.log
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=2,defer_batch=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=16819
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
DefMemPerCPU=512
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=$memory Gres=gpu:h100:2 State=UNKNOWN
PartitionName=gpu Nodes=$host Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=high Nodes=$host MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
END
cat > "$base/slurmdbd.conf" << END
AuthType=auth/munge
DbdHost=localhost
DbdPort=16819
SlurmUser=root
LogFile=$base/log/slurmdbd.log
PidFile=$base/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
END
chmod 600 "$base/slurmdbd.conf"
export SLURM_CONF="$base/slurm.conf"
mkdir -p /etc/slurm
ln -sf "$base/slurm.conf" /etc/slurm/slurm.conf

# slurmdbd finds the database by the client library's default socket.
mkdir -p /run/mysqld
chown mysql: /run/mysqld "$base/db"
if ! pgrep -x mariadbd > /dev/null; then
    [ -d "$base/db/mysql" ] || mariadb-install-db --user=mysql --datadir="$base/db" --skip-test-db > "$base/log/install.log" 2>&1
    setsid mariadbd --user=mysql --skip-networking --socket=/run/mysqld/mysqld.sock --datadir="$base/db" \
        --innodb-buffer-pool-size=64M --pid-file=/run/mysqld/mysqld.pid > "$base/log/mysqld.log" 2>&1 < /dev/null &
    touch "$base/started_mariadb"
fi
for _ in $(seq 60); do
    mariadb-admin ping > /dev/null 2>&1 && break
    sleep 0.5
done
mariadb -e "create database if not exists slurm_acct;
    create user if not exists slurm@localhost identified by 'slurm';
    grant all on slurm_acct.* to slurm@localhost;"
slurmdbd
for _ in $(seq 60); do
    sacctmgr -n list cluster > /dev/null 2>&1 && break
    sleep 0.5
done
sacctmgr -i add cluster dev > /dev/null || true
sacctmgr -i add account research cluster=dev > /dev/null || true
sacctmgr -i add user root account=research cluster=dev > /dev/null || true
slurmctld
sleep 1
slurmd
for _ in $(seq 60); do
    sinfo -h -o "%t" 2> /dev/null | grep -q idle && break
    sleep 0.5
done
sinfo -N -o "%N %t %c %m %G"
