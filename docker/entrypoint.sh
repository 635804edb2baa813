#!/bin/sh
# Gives this container a node of its own in a volume that the replicas of a service share: the first of its directories
# 1, 2, ... that no other container holds. It is held for as long as the node runs, so that identities and checkpoints
# stay whichever containers come and go. $SWARMNODE_NODE__DATA_DIR, which every command in this container looks at,
# becomes a link to it. Anything but `start` runs as it is.
set -eu

volume=${SWARMNODE_VOLUME:-/data}
unset SWARMNODE_VOLUME  # a name like those of settings, but none

[ "${1:-start}" = start ] || exec swarmnode "$@"

number=1
while [ "$number" -le 1000 ]; do
    mkdir -p -m 700 "$volume/$number"
    # The descriptor outlives this script: the node inherits it, and its children do not.
    exec 9<"$volume/$number"
    if flock --nonblock 9; then
        ln -sfn "$volume/$number" "$SWARMNODE_NODE__DATA_DIR"
        echo "this node is number $number in $volume"
        exec swarmnode "$@"
    fi
    number=$((number + 1))
done
echo "the first 1000 directories in $volume are all in use" >&2
exit 1
