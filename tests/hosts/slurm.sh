#!/bin/bash
# A real SkyPilot on a real Slurm whose nodes are namespaces, for tests: one Debian 12 machine, root, no systemd, nothing
# but apt and PyPI. One kernel, so never evidence of several physical hosts.
#   slurm.sh install|up|down|processes NODE|listeners NODE|files NODE|crash NODE|boot NODE
# Everything below BASE. On the machine itself: slurmctld, munged, sshd (the "login node"), SkyPilot's API server. Each
# node: its own network, mount, UTS and PID namespace, address, /tmp and /dev/shm, the same ports, no way out. Only BASE
# is shared, as Slurm wants a shared home. What this machine cannot have is measured in the project's notes: SkyPilot
# bootstraps each cluster with uv and CPython 3.10 from the internet, so a site hook gives it uv and maps 3.10 to the
# system's Python.
set -euo pipefail
: "${BASE:?a directory for everything, outside /tmp}" "${SKY_PYTHON:?SkyPilot\'s interpreter}" "${TAG:?prefix of names, at most 6 characters}"
: "${SUBNET:?three numbers of an address}" "${PB:?first of 100 ports}" "${JOBUSER:?the user whose jobs SkyPilot starts}"
NODES=${NODES:-2}
CHECKOUT=$(cd "$(dirname "$0")/../.." && pwd)
SKY_BIN=$(dirname "$SKY_PYTHON")
export SLURM_CONF=$BASE/slurm/slurm.conf
say() { printf 'slurm.sh: %s\n' "$*" >&2; }
die() { say "FAILED: $*"; exit 1; }
nodes() { seq -f 'n%g' 1 "$NODES"; }
on() { local n=$1; shift; nsenter -t "$(cat "$BASE/run/node.$n.pid")" -m -n -p -u -- "$@"; }
sky_env() { env -i HOME="$BASE/home" PATH="$SKY_BIN:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" LANG=C.UTF-8 \
    SKYPILOT_DISABLE_USAGE_COLLECTION=1 SKYPILOT_API_SERVER_LOCAL_PORT=$((PB + 80)) "$@"; }

install() {
    if ! command -v slurmctld munged /usr/sbin/sshd rsync ip | awk 'END {exit NR != 5}'; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge openssh-server \
            rsync iproute2 python3-venv >"$BASE/log/apt.log" 2>&1 || die "apt-get (see $BASE/log/apt.log)"
    fi
    # What SkyPilot's bootstrap installs on the nodes comes from a directory of wheels on the share.
    if [ ! -e "$BASE/wheels/.done" ]; then
        "$SKY_BIN/python" -m pip wheel -q -w "$BASE/wheels" 'skypilot[slurm,remote]==0.14.1' pip setuptools wheel uv >"$BASE/log/wheel.log" 2>&1
        touch "$BASE/wheels/.done"
    fi
    mkdir -p "$BASE/tools" "$BASE/environments"
    [ -x "$BASE/tools/uv/bin/uv" ] || "$SKY_BIN/python" -m pip install -q --no-deps --no-index --find-links "$BASE/wheels" --target "$BASE/tools/uv" uv
    cat >"$BASE/tools/uv-shim" <<END
#!/bin/bash
args=(); prev=
for a in "\$@"; do
    [ "\$prev" = --python ] && [ "\$a" = 3.10 ] && a=/usr/bin/python3
    args+=("\$a"); prev=\$a
done
export UV_OFFLINE=1 UV_FIND_LINKS=$BASE/wheels UV_PYTHON_DOWNLOADS=never
exec $BASE/tools/uv/bin/uv "\${args[@]}"
END
    chmod 755 "$BASE/tools/uv-shim" "$BASE/environments"
    # The application's environment, built once by root for every user, with the interpreter that the nodes have.
    (cd "$CHECKOUT" && /usr/bin/python3 -B -m trainer.environment ensure --root "${ENVIRONMENTS:-$BASE/environments}" --device cpu --shared) \
        >"$BASE/log/environment.log" 2>&1 || die "$(tail -n 3 "$BASE/log/environment.log")"
}

configure() {
    id "$JOBUSER" >/dev/null 2>&1 || useradd -M -s /bin/bash "$JOBUSER"
    usermod -d "$BASE/jobhome" -p '*' "$JOBUSER" # '*': no password, but not locked, which sshd would refuse
    mkdir -p "$BASE"/{munge,run/munge,sshd,slurm/state,jobhome/.ssh,home/.slurm,home/.sky,home/.ssh,log/munge}
    chmod 755 "$BASE" "$BASE/run" "$BASE/run/munge"
    chmod 700 "$BASE/home"
    [ -s "$BASE/munge/munge.key" ] || dd if=/dev/urandom of="$BASE/munge/munge.key" bs=1024 count=1 status=none
    # One munged for all: its socket is a file on the share, and does not care about network namespaces.
    chown -R munge:munge "$BASE/munge" "$BASE/run/munge" "$BASE/log/munge"
    chmod 700 "$BASE/munge" "$BASE/log/munge"
    chmod 400 "$BASE/munge/munge.key"
    cat >"$SLURM_CONF" <<END
ClusterName=netns
SlurmctldHost=ctl($SUBNET.1)
SlurmctldPort=$((PB + 17))
SlurmdPort=$((PB + 18))
AuthInfo=socket=$BASE/run/munge/munge.socket
SlurmUser=root
StateSaveLocation=$BASE/slurm/state
SlurmdSpoolDir=$BASE/slurm/spool.%n
SlurmctldPidFile=$BASE/run/slurmctld.pid
SlurmdPidFile=$BASE/run/slurmd.%n.pid
SlurmctldLogFile=$BASE/log/slurmctld.log
SlurmdLogFile=$BASE/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskProlog=$BASE/slurm/taskprolog.sh
Epilog=$BASE/slurm/epilog.sh
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
MinJobAge=60
SlurmdTimeout=30
END
    printf '127.0.0.1 localhost\n%s.1 ctl\n' "$SUBNET" >"$BASE/slurm/hosts"
    for i in $(seq 1 "$NODES"); do
        echo "NodeName=n$i NodeAddr=$SUBNET.$((i + 1)) CPUs=8 RealMemory=12000 State=UNKNOWN" >>"$SLURM_CONF"
        echo "$SUBNET.$((i + 1)) n$i" >>"$BASE/slurm/hosts"
    done
    echo "PartitionName=main Nodes=n[1-$NODES] Default=YES MaxTime=1-00:00:00 State=UP" >>"$SLURM_CONF"
    # A site's hook, before the batch script, as the job's user.
    cat >"$BASE/slurm/taskprolog.sh" <<END
#!/bin/bash
if [ -z "\$SLURM_STEP_ID" ] && [ -n "\$SLURM_JOB_NAME" ]; then
    d=$BASE/jobhome/.sky_clusters/\$SLURM_JOB_NAME/.local/bin
    mkdir -p "\$d" && ln -sfn $BASE/tools/uv-shim "\$d/uv"
fi
exit 0
END
    # A site's hook, as root on each node at a job's end: nodes are exclusive, so whatever that user still has is the job's.
    cat >"$BASE/slurm/epilog.sh" <<END
#!/bin/bash
{
    p=\$(ps -u "\$SLURM_JOB_USER" -o pid=)
    f=\$(find /tmp /dev/shm -mindepth 1 -maxdepth 1 -user "\$SLURM_JOB_USER")
    echo "\$(hostname), job \$SLURM_JOB_ID: \$(echo \$p | wc -w) processes; files" \$f
    [ -n "\$p" ] && ps -u "\$SLURM_JOB_USER" -o pid=,args= | cut -c1-120 && kill -9 \$p
    [ -n "\$f" ] && rm -rf -- \$f
} >>$BASE/log/epilog.\$(hostname) 2>&1
exit 0
END
    chmod 755 "$BASE"/slurm/{taskprolog,epilog}.sh
    mkdir -p /run/sshd
    for k in sshd/host_ed25519 home/.ssh/slurm_ed25519; do [ -f "$BASE/$k" ] || ssh-keygen -q -t ed25519 -N '' -f "$BASE/$k"; done
    cp "$BASE/home/.ssh/slurm_ed25519.pub" "$BASE/jobhome/.ssh/authorized_keys"
    chown -R "$JOBUSER:" "$BASE/jobhome"
    chmod 755 "$BASE/jobhome"
    chmod 700 "$BASE/jobhome/.ssh"
    chmod 600 "$BASE/jobhome/.ssh/authorized_keys"
    printf '%s\n' "Port $((PB + 22))" "ListenAddress 127.0.0.1" "HostKey $BASE/sshd/host_ed25519" "PidFile $BASE/run/sshd.pid" \
        "UsePAM no" "StrictModes no" "PasswordAuthentication no" "AllowUsers $JOBUSER" "MaxSessions 200" "MaxStartups 150:30:200" \
        "SetEnv SLURM_CONF=$SLURM_CONF SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt" >"$BASE/sshd/sshd_config"
    printf '%s\n' "Host netns" "  HostName 127.0.0.1" "  Port $((PB + 22))" "  User $JOBUSER" "  IdentityFile $BASE/home/.ssh/slurm_ed25519" \
        "  IdentitiesOnly yes" >"$BASE/home/.slurm/config"
    # exclusive: the agents of two SkyPilot clusters of one user on one node end each other.
    printf 'slurm:\n  sbatch_options:\n    exclusive: true\n' >"$BASE/home/.sky/config.yaml"
}

# The network namespace outlives the node, like a NIC and its address; all else dies with the PID namespace's init.
boot() {
    local n=$1 waiter=
    rm -rf "$BASE/slurm/tmp.$n"
    mkdir -p "$BASE/slurm/tmp.$n" "$BASE/slurm/spool.$n"
    chmod 1777 "$BASE/slurm/tmp.$n"
    setsid nsenter --net="/run/netns/$TAG$n" unshare -m -u -p -f --mount-proc --propagation private bash -c "hostname $n
        mount --bind $BASE/slurm/hosts /etc/hosts; mount --bind $BASE/slurm/tmp.$n /tmp; mount -t tmpfs -o mode=1777 shm /dev/shm
        /usr/sbin/slurmd -D -N $n -f $SLURM_CONF & wait \$!; exit" </dev/null >"$BASE/log/node.$n.out" 2>&1 &
    waiter=$!
    for _ in $(seq 50); do ps -o pid= --ppid $waiter >"$BASE/run/node.$n.pid" && return; sleep 0.1; done
    die "$n does not start"
}

crash() { kill -9 "$(cat "$BASE/run/node.$1.pid")"; }

up() {
    ip link add "${TAG}br" type bridge
    ip addr add "$SUBNET.1/24" dev "${TAG}br"
    ip link set "${TAG}br" up
    for i in $(seq 1 "$NODES"); do
        ip netns add "${TAG}n$i"
        ip link add "${TAG}v$i" type veth peer name eth0 netns "${TAG}n$i"
        ip link set "${TAG}v$i" master "${TAG}br" up
        ip -n "${TAG}n$i" addr add "$SUBNET.$((i + 1))/24" dev eth0
        ip -n "${TAG}n$i" link set eth0 up
        ip -n "${TAG}n$i" link set lo up
    done
    setpriv --reuid munge --regid munge --clear-groups /usr/sbin/munged --key-file="$BASE/munge/munge.key" \
        --socket="$BASE/run/munge/munge.socket" --pid-file="$BASE/run/munge/munged.pid" \
        --log-file="$BASE/log/munge/munged.log" --seed-file="$BASE/munge/munged.seed"
    # slurmctld listens on what its host's name resolves to: it gets a name that is SUBNET.1.
    unshare -m -u --propagation private bash -c "hostname ctl; mount --bind $BASE/slurm/hosts /etc/hosts; exec /usr/sbin/slurmctld -c -f $SLURM_CONF"
    for n in $(nodes); do boot "$n"; done
    /usr/sbin/sshd -f "$BASE/sshd/sshd_config" -E "$BASE/log/sshd.log"
    for _ in $(seq 40); do
        [ "$(timeout 5 sinfo -h -N -o %t 2>/dev/null | grep -c '^idle$')" = "$NODES" ] && break
        sleep 0.5
    done
    [ "$(timeout 5 sinfo -h -N -o %t | grep -c '^idle$')" = "$NODES" ] || die "Slurm: $(sinfo -h -N -o '%N %t')"
    sky_env sky api start >"$BASE/log/api-start.log" 2>&1 || die "$(tail -n 3 "$BASE/log/api-start.log")"
}

# Processes that hold a file of SkyPilot's home: its servers and their executors.
skypilots() { { find /proc/[0-9]*/fd -lname "$BASE/home/*" 2>/dev/null || true; } | cut -d/ -f3 | sort -u; }

down() {
    local p f g left=
    p=$(ss -ltnp | grep "127.0.0.1:$((PB + 80)) " | grep -o 'pid=[0-9]*' | head -n 1 | cut -d= -f2 || true)
    sky_env sky api stop >/dev/null 2>&1 || true
    [ -n "$p" ] && kill -9 -- "-$p" 2>/dev/null || true # the server leads its own process group
    # Its executors outlive a server that was killed, under names and with environments that tell nothing.
    for p in $(skypilots); do kill -9 "$p" 2>/dev/null || true; done
    for f in "$BASE"/run/node.*.pid; do [ -s "$f" ] && kill -9 "$(cat "$f")" 2>/dev/null || true; done
    # SkyPilot keeps ssh connections: the sessions of our own sshd end first.
    [ -s "$BASE/run/sshd.pid" ] && for g in $(ps -o pid= --ppid "$(cat "$BASE/run/sshd.pid")"); do kill "$g" 2>/dev/null || true; done
    for f in "$BASE/run/slurmctld.pid" "$BASE/run/sshd.pid" "$BASE/run/munge/munged.pid"; do [ -s "$f" ] && kill "$(cat "$f")" 2>/dev/null || true; done
    rm -f "$BASE"/run/*.pid "$BASE/run/munge/munged.pid"
    for n in $(nodes); do ip netns del "$TAG$n" 2>/dev/null || true; done
    ip link del "${TAG}br" 2>/dev/null || true
    for _ in $(seq 60); do
        left=$(
            ps -eo pid=,ppid=,stat=,args= | B=$BASE/ awk -v me=$$ '$1 != me && $2 != me && $3 !~ /^Z/ && index($0, ENVIRON["B"])'
            ss -ltnH "sport >= :$PB and sport <= :$((PB + 99))"
            ip -br link | grep "^$TAG" || true
            skypilots
        )
        [ -z "$left" ] && { userdel "$JOBUSER" 2>/dev/null || true; return; }
        sleep 1
    done
    die "left on the machine: $left"
}

case $BASE/ in /tmp/*) die "BASE below /tmp: every node has its own /tmp" ;; esac
mkdir -p "$BASE/log"
case ${1:-} in
install) install ;;
up)
    configure
    up
    ;;
down) down ;;
processes) on "$2" ps -u "$JOBUSER" -o pid=,args= || true ;;
listeners) on "$2" ss -ltnH "sport != :$((PB + 18))" ;;
files) on "$2" find /tmp /dev/shm -mindepth 1 -maxdepth 1 ;;
crash | boot) "$1" "$2" ;;
*) die "install, up, down, processes, listeners, files, crash or boot" ;;
esac
