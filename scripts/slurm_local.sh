#!/usr/bin/env bash
# A real SLURM of one node on this machine, for tests: root, Debian, no systemd, no cgroups, no accounting.
#   scripts/slurm_local.sh start     install what is missing, write /etc/slurm/slurm.conf, start the daemons
#   scripts/slurm_local.sh stop      stop them
# Without an accounting database there is no sacct, which submitit asks how jobs ended: start puts a stand-in for it,
# which asks scontrol, into /usr/local/bin.
set -eu

start() {
    if ! command -v slurmctld slurmd munged sbatch > /dev/null; then
        apt-get update -qq || true
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge > /dev/null
    fi
    local host cpus memory
    host=$(hostname -s) cpus=$(nproc) memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
    grep -qw "$host" /etc/hosts || echo "127.0.0.1 $host" >> /etc/hosts

    [ -f /etc/munge/munge.key ] || head -c 1024 /dev/urandom > /etc/munge/munge.key
    chown munge:munge /etc/munge/munge.key
    chmod 400 /etc/munge/munge.key
    install -d -o munge -g munge -m 755 /run/munge
    install -d -o munge -g munge -m 700 /var/log/munge /var/lib/munge
    pgrep -x munged > /dev/null || setsid su -s /bin/sh munge -c /usr/sbin/munged

    install -d /etc/slurm /run/slurm /var/spool/slurmctld /var/spool/slurmd /var/log/slurm
    cat > /etc/slurm/slurm.conf << CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
MailProg=/bin/true
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
    command -v sacct > /dev/null && sacct -n > /dev/null 2>&1 || stand_in > /usr/local/bin/sacct
    chmod +x /usr/local/bin/sacct 2> /dev/null || true
    for _ in $(seq 20); do munge -n > /dev/null 2>&1 && break || sleep 0.25; done
    pgrep -x slurmctld > /dev/null || setsid slurmctld
    pgrep -x slurmd > /dev/null || setsid slurmd
    for _ in $(seq 60); do
        [ "$(sinfo -h -o %T 2> /dev/null)" = idle ] && return
        sleep 0.5
    done
    echo "SLURM does not get ready: $(sinfo -h -o %T 2>&1); see /var/log/slurm" >&2
    exit 1
}

# Answers `sacct -o JobID,State,NodeList --parsable2 -j ID ...`.
stand_in() {
    cat << 'PYTHON'
#!/usr/bin/env python3
import re
import subprocess
import sys

print("JobID|State|NodeList")
for flag, job in zip(sys.argv[1:], sys.argv[2:]):
    if flag != "-j":
        continue
    shown = subprocess.run(["scontrol", "-o", "show", "job", job], capture_output=True, text=True).stdout
    for line in shown.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobId" not in fields:
            continue
        name = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}" if "ArrayTaskId" in fields else fields["JobId"]
        if "-" in name or "," in name:
            name = name.replace("_", "_[") + "]"
        print(f"{name}|{fields['JobState']}|{fields.get('NodeList', '')}")
PYTHON
}

case "${1:-}" in
    start) start ;;
    stop) pkill -x slurmctld || true; pkill -x slurmd || true; pkill -x munged || true ;;
    *) sed -n '2,6s/^# //p' "$0"; exit 2 ;;
esac
