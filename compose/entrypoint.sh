#!/bin/sh
# Starts a rank as the owner of runs/, so that no file of a run belongs to root on the host, whatever the user's id.
# The container begins as root for this alone; a rank computes as root only where runs/ is root's.
set -eu

owner=$(stat -c %u runs)
if [ "$(id -u)" = 0 ] && [ "$owner" != 0 ]; then
    # The bounding set stays, as shrinking it takes a capability more; no-new-privileges makes it worthless.
    exec setpriv --reuid "$owner" --regid "$(stat -c %g runs)" --clear-groups --inh-caps=-all --no-new-privs "$0" "$@"
fi

if ! [ -w runs ] || ! [ -x runs ]; then
    echo "rank ${RANK:-0}: runs/ cannot be written by its owner, uid $owner: make it writable (chmod u+rwx runs) or mount it so" >&2
    exit 2
fi
exec "$@"
