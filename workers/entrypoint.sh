#!/bin/sh
# Starts a rank as the owner of runs/, so that no file of a run belongs to root on the host, whatever the user's id.
# The container begins as root for this alone; a rank computes as root only where runs/ is root's.
# It stays behind the rank to say what the rank cannot: that the kernel killed it because memory ran out.
set -eu

# With compose/net.yaml it may shape the container's link (capability 12, NET_ADMIN): link.py does so, gives that up, and returns here.
if [ "$((0x$(sed -n 's/^CapEff:[[:space:]]*//p' /proc/self/status) >> 12 & 1))" = 1 ]; then
    exec python -m distlab.lab.cluster.link "$0" "$@"
fi

owner=$(stat -c %u runs)
if [ "$(id -u)" = 0 ] && [ "$owner" != 0 ]; then
    # The bounding set stays, as shrinking it takes a capability more; no-new-privileges makes it worthless.
    exec setpriv --reuid "$owner" --regid "$(stat -c %g runs)" --clear-groups --inh-caps=-all --no-new-privs "$0" "$@"
fi

if ! [ -w runs ] || ! [ -x runs ]; then
    echo "rank ${RANK:-0}: runs/ cannot be written by its owner, uid $owner: make it writable (chmod u+rwx runs) or mount it so" >&2
    exit 2
fi

# Whoever sits at a terminal sees how it ends, and the shell would keep the terminal from what it starts beside itself.
if [ -t 0 ]; then
    exec "$@"
fi

# The kernel's count of processes that it killed here, by cgroup v1 and v2.
killed_for_memory() {
    cat /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events 2>/dev/null | grep -q '^oom_kill [1-9]'
}

: >/tmp/distlab-oom-notice
"$@" &
rank=$!
trap 'kill -TERM "$rank"' TERM
trap 'kill -INT "$rank"' INT
code=0
# A signal ends `wait` before what it waits for.
while kill -0 "$rank" 2>/dev/null; do wait "$rank" && code=0 || code=$?; done
if [ "$code" = 137 ] && killed_for_memory; then
    python -m distlab.lab.cluster.oom_notice
fi
exit "$code"
