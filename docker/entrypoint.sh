#!/bin/sh
# Gives this container a node of its own in a volume that the replicas of a service share: the first of its directories
# 1, 2, ... that no other container holds. It is held for as long as the node runs, so that identities and checkpoints
# stay whichever containers come and go. $SWARMNODE_NODE__DATA_DIR, which every command in this container looks at,
# becomes a link to it, unless it names a directory of its own. Anything but `start` runs as it is.
set -eu

volume=${SWARMNODE_VOLUME:-/data}
data=$SWARMNODE_NODE__DATA_DIR
unset SWARMNODE_VOLUME  # a name like those of settings, but none

fail() {
    echo "error: $1" >&2
    exit 1
}

[ "${1:-start}" = start ] || exec swarmnode "$@"

# In the volume a link would be there for all containers, each of which needs its own.
case $data in "$volume"/*) exec swarmnode "$@" ;; esac
[ -d "$data" ] && ! [ -L "$data" ] && exec swarmnode "$@"

user="user $(id -u)"
[ -d "$volume" ] && [ -w "$volume" ] && [ -x "$volume" ] ||
    fail "$volume cannot be written by $user: mount a volume there, or a directory of the host that belongs to this user"
number=1
while [ "$number" -le 1000 ]; do
    mkdir -p -m 700 "$volume/$number" || fail "there is no place for a node in $volume: see above"
    [ -r "$volume/$number" ] && [ -w "$volume/$number" ] && [ -x "$volume/$number" ] ||
        fail "$volume/$number belongs to another user: give it to $user, with all that is in it"
    # The descriptor outlives this script: the node inherits it, and its children do not.
    exec 9<"$volume/$number"
    if flock --nonblock 9; then
        ln -sfn "$volume/$number" "$data" || fail "$data cannot be made: see above; --tmpfs /tmp makes room for it"
        echo "this node is number $number in $volume"
        exec swarmnode "$@"
    fi
    number=$((number + 1))
done
fail "the first 1000 directories in $volume are all in use"
