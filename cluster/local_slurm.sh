#!/bin/bash
# A developer's Slurm on one machine: a real slurmctld and a slurmd a node, every node in namespaces of its own.
#
#   cluster/local_slurm.sh start DIR [NODES [CPUS [GPUS [SHARED...]]]]  boot; the nodes are n1, n2, ...
#   cluster/local_slurm.sh login DIR COMMAND...                   run a command as on the login node
#   cluster/local_slurm.sh on DIR NODE COMMAND...                 run a command on a node
#   cluster/local_slurm.sh kill DIR NODE                          a node loses its power
#   cluster/local_slurm.sh revive DIR NODE                        and has it again
#   cluster/local_slurm.sh away|back DIR                          slurmctld ends, and starts again
#   cluster/local_slurm.sh stop DIR                               end everything and remove DIR
#   cluster/local_slurm.sh check                                  say why this machine cannot, where it cannot
#
# A node has its own network (10.83.0.1x), host name, processes, /dev/shm and /tmp, which holds TMP_MB where that is set
# at the start; DIR, and the SHARED paths that lie under /tmp, are the shared file system. Needs root, and on Debian:
# slurm-wlm slurm-client munge iproute2 procps. With ACCOUNTING=full at the start sacct tells all, from a data base
# (slurmdbd mariadb-server); else only sacct -c tells something.
# Nothing is enforced (no control groups): processors are only Slurm's word, and GPUs copies of /dev/null.
set -euo pipefail

NETWORK=10.83.0
MEMORY_MB=6000

fail() { echo "local_slurm: $*" >&2; exit 1; }

until_true() { # SECONDS COMMAND...
  local end=$((SECONDS + $1)); shift
  until "$@" &>/dev/null; do ((SECONDS < end)) || return 1; sleep 0.1; done
}

login() { nsenter --net="/run/netns/$(cat "$DIR/name")-login" env SLURM_CONF="$DIR/etc/slurm.conf" "$@"; }

accounting() {
  if [ "${ACCOUNTING:-}" = full ]; then
    printf 'AccountingStorage%s\n' Type=accounting_storage/slurmdbd "Host=$NETWORK.1" "Pass=$DIR/munge/socket" TRES=gres/gpu
  else
    echo AccountingStorageType=accounting_storage/none
  fi
}

write_configuration() { # NODES CPUS GPUS
  local node gpu
  mkdir -p "$DIR"/{etc,dev,log,run,state,spool,munge}
  chmod 711 "$DIR/munge"
  (umask 077; head -c 256 /dev/urandom >"$DIR/munge/key")
  {
    cat <<CONF
ClusterName=local
SlurmctldHost=$(hostname -s)($NETWORK.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$DIR/munge/socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.own
SlurmdPidFile=$DIR/run/slurmd-%n.own
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd-%n.log
# Only plugins that do without systemd and without control groups.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
GresTypes=gpu
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=600
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobs.txt
$(accounting)
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP DefMemPerCPU=$((MEMORY_MB / $2))
PartitionName=short Nodes=ALL MaxTime=2 State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
    for ((node = 1; node <= $1; node++)); do
      echo "NodeName=n$node NodeHostname=n$node NodeAddr=$NETWORK.$((10 + node)) CPUs=$2 Gres=gpu:$3 RealMemory=$MEMORY_MB State=UNKNOWN"
    done
  } >"$DIR/etc/slurm.conf"
  for ((gpu = 0; gpu < $3; gpu++)); do
    mknod -m 666 "$DIR/dev/gpu$gpu" c 1 3
    echo "NodeName=n[1-$1] Name=gpu File=$DIR/dev/gpu$gpu"
  done >"$DIR/etc/gres.conf"
  # slurmd looks for a cgroup version even where no plugin uses one; named, it does not.
  printf 'CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n' >"$DIR/etc/cgroup.conf"
  {
    echo "127.0.0.1 localhost"
    echo "$NETWORK.1 $(hostname -s)"
    for ((node = 1; node <= $1; node++)); do echo "$NETWORK.$((10 + node)) n$node"; done
  } >"$DIR/etc/hosts"
}

make_networks() { # NODES
  local name node
  name=$(cat "$DIR/name")
  ip netns add "$name-login"
  ip -n "$name-login" link set lo up
  ip -n "$name-login" link add bridge type bridge
  ip -n "$name-login" address add "$NETWORK.1/24" dev bridge
  ip -n "$name-login" link set bridge up
  for ((node = 1; node <= $1; node++)); do
    ip netns add "$name-n$node"
    ip -n "$name-login" link add "to-n$node" type veth peer name eth0 netns "$name-n$node"
    ip -n "$name-login" link set "to-n$node" master bridge up
    ip -n "$name-n$node" link set lo up
    ip -n "$name-n$node" address add "$NETWORK.$((10 + node))/24" dev eth0
    ip -n "$name-n$node" link set eth0 up
  done
}

start_accounting() {
  local data=$DIR/accounting
  mariadb-install-db --no-defaults --user=root --datadir="$data" &>"$DIR/log/mariadb-install.log" ||
    fail "no data base; see $DIR/log"
  setsid mariadbd --no-defaults --user=root --datadir="$data" --socket="$data/socket" --pid-file="$data/own" \
    --skip-networking --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
    </dev/null &>"$DIR/log/mariadbd.log" &
  echo $! >"$DIR/run/mariadbd.pid"
  until_true 60 mariadb --no-defaults --socket="$data/socket" --execute='select 1' || fail "mariadbd does not answer"
  (umask 077; cat >"$DIR/etc/slurmdbd.conf") <<CONF
AuthInfo=socket=$DIR/munge/socket
DbdHost=$(hostname -s)
DbdAddr=$NETWORK.1
SlurmUser=root
LogFile=$DIR/log/slurmdbd.log
PidFile=$DIR/run/slurmdbd.own
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
CONF
  MYSQL_UNIX_PORT=$data/socket SLURM_CONF=$DIR/etc/slurm.conf setsid \
    nsenter --net="/run/netns/$(cat "$DIR/name")-login" slurmdbd -D </dev/null &>"$DIR/log/slurmdbd.out" &
  echo $! >"$DIR/run/slurmdbd.pid"
  until_true 60 login sacctmgr --noheader show cluster || fail "slurmdbd does not answer; see $DIR/log"
}

boot_node() { # NODE, in its namespaces, as process 1: bash, as someone has to reap orphans
  local root=$DIR/node/$1 path
  mount --make-rprivate /
  mount -t proc proc /proc
  mountpoint -q /sys/fs/cgroup || mount -t tmpfs tmpfs /sys/fs/cgroup
  hostname "$1"
  mount --bind "$DIR/etc/hosts" /etc/hosts
  mount -t tmpfs -o size=4g,mode=1777 tmpfs /dev/shm
  mkdir -p "$root/tmp"
  [ ! -s "$DIR/tmp_mb" ] || mount -t tmpfs -o "size=$(cat "$DIR/tmp_mb")m" tmpfs "$root/tmp"
  chmod 1777 "$root/tmp"
  while read -r path; do
    case $path in /tmp/*) mkdir -p "$root$path"; mount --rbind "$path" "$root$path" ;; esac
  done <"$DIR/shared"
  mount --rbind "$root/tmp" /tmp
  SLURM_CONF=$DIR/etc/slurm.conf slurmd -D -N "$1" &
  wait $!
}

start_node() { # NODE
  mkdir -p "$DIR/spool/$1"
  setsid nsenter --net="/run/netns/$(cat "$DIR/name")-$1" \
    unshare --mount --uts --pid --fork --kill-child "$0" boot "$DIR" "$1" </dev/null &>>"$DIR/log/node-$1.log" &
  echo $! >"$DIR/run/node-$1.pid"
}

start_controller() {
  setsid nsenter --net="/run/netns/$(cat "$DIR/name")-login" slurmctld -D -i -f "$DIR/etc/slurm.conf" \
    </dev/null &>>"$DIR/log/slurmctld.out" &
  echo $! >"$DIR/run/slurmctld.pid"
  until_true 20 login scontrol ping || fail "slurmctld does not answer; see $DIR/log"
}

stop_controller() {
  local process
  process=$(cat "$DIR/run/slurmctld.pid")
  kill "$process"
  while kill -0 "$process" 2>/dev/null; do sleep 0.1; done
}

start() { # NODES CPUS GPUS SHARED...
  local node nodes=$1
  [ "$(id -u)" = 0 ] || fail "network namespaces need root"
  [ -e "$DIR/name" ] && fail "$DIR is in use"
  echo "tr$$" >"$DIR/name"
  write_configuration "$1" "$2" "$3"
  printf '%s\n' "$DIR" "${@:4}" >"$DIR/shared"
  echo -n "${TMP_MB:-}" >"$DIR/tmp_mb"
  setsid munged --foreground --force --key-file="$DIR/munge/key" --socket="$DIR/munge/socket" \
    --pid-file="$DIR/munge/pid" --seed-file="$DIR/munge/seed" --log-file="$DIR/log/munged.log" --num-threads=2 \
    </dev/null &>"$DIR/log/munged.out" &
  echo $! >"$DIR/run/munged.pid"
  until_true 10 munge -S "$DIR/munge/socket" -n || fail "munged does not answer; see $DIR/log"
  make_networks "$nodes"
  [ "${ACCOUNTING:-}" != full ] || start_accounting
  start_controller
  for ((node = 1; node <= nodes; node++)); do start_node "n$node"; done
  all_idle() { [ "$(login sinfo -h -N -p main -t idle -o %N | wc -l)" = "$nodes" ]; }
  until_true 20 all_idle || fail "not every node came up; see $DIR/log"
}

end_tree() { # PROCESS: killed after its descendants
  local child
  for child in $(ps -o pid= --ppid "$1"); do end_tree "$child"; done
  kill -9 "$1" 2>/dev/null || true
}

stop() {
  local file name namespace process
  name=$(cat "$DIR/name")
  for file in "$DIR"/run/*.pid; do [ ! -e "$file" ] || end_tree "$(cat "$file")"; done
  for namespace in $(ip netns list | awk '{print $1}' | grep "^$name-" || true); do
    for process in $(ip netns pids "$namespace"); do kill -9 "$process" 2>/dev/null || true; done
    ip netns delete "$namespace"
  done
  rm -rf --one-file-system "$DIR"
}

on_node() { # NODE COMMAND...
  local inside
  inside=$(pgrep -P "$(cat "$DIR/run/node-$1.pid")" | head -1)
  nsenter -t "$inside" -m -u -n -p env SLURM_CONF="$DIR/etc/slurm.conf" "${@:2}"
}

check() {
  [ "$(id -u)" = 0 ] || fail "network namespaces need root"
  TRIAL=tr$$-check
  trap 'ip netns delete "$TRIAL" 2>/dev/null || true' EXIT
  ip netns add "$TRIAL"
  ip -n "$TRIAL" link add bridge type bridge
  ip -n "$TRIAL" link add one type veth peer name two
  nsenter --net="/run/netns/$TRIAL" unshare --mount --uts --pid --fork --kill-child sh -ec \
    'mount --make-rprivate /; mount -t proc proc /proc; mount -t tmpfs tmpfs /dev/shm; hostname n1'
}

if [ "${1:-}" = check ]; then check; exit; fi
[ $# -ge 2 ] || { sed -n '2,17p' "$0" >&2; exit 2; }
command=$1
if [ "$command" = start ]; then mkdir -p "$2"; else [ -e "$2/name" ] || fail "no Slurm was started in $2"; fi
DIR=$(readlink -f "$2")
shift 2
case $command in
  start) start "${1:-3}" "${2:-4}" "${3:-0}" "${@:4}" ;;
  boot) boot_node "$1" ;;
  login) login "$@" ;;
  on) on_node "$@" ;;
  kill) end_tree "$(cat "$DIR/run/node-$1.pid")" ;;
  revive) start_node "$1" ;;
  away) stop_controller ;;
  back) start_controller ;;
  stop) stop ;;
  *) fail "$command is none of start, login, on, kill, revive, away, back and stop" ;;
esac
