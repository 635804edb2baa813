#!/usr/bin/env bash
# Brings the testnet up, tries on it what a swarm has to survive, and prints a table:
#
#   docker/testnet.sh [--nodes N] [--more N] [--no-build] [--keep]
#
# --more nodes are added for a while, 2 unless told. MODEL, ENGINE, NODE_CPUS, NODE_MEMORY and the rest of compose.yaml's
# variables are taken from the environment; DOCKER and COMPOSE name the programs. Without --keep the containers go at the
# end, and their volume with them.
set -euo pipefail
cd "$(dirname "$0")"

nodes=4 more=2 build=yes keep=no
while [ $# -gt 0 ]; do
    case $1 in
        --nodes) nodes=$2; shift ;;
        --more) more=$2; shift ;;
        --no-build) build=no ;;
        --keep) keep=yes ;;
        *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
    shift
done
docker=${DOCKER:-docker}
compose=${COMPOSE:-$($docker compose version >/dev/null 2>&1 && echo "$docker compose" || echo docker-compose)}
export COMPOSE_PROJECT_NAME=${COMPOSE_PROJECT_NAME:-swarmnode-testnet}
patience=${PATIENCE:-900}  # seconds for any one step

rows=()
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f s", b - a }'; }
say() { printf '%s  %s\n' "$(date +%H:%M:%S)" "$*" >&2; }
row() { rows+=("$1|$2"); say "$1: $2"; }
fail() { say "failed: $*"; $compose logs --tail 20 node >&2 || true; exit 1; }
running() { $compose ps -q node; }
ask() { $docker exec -i "$@"; }

# Wait until a command succeeds; the first argument says what for.
await() {
    local what=$1 begin=$SECONDS
    shift
    until "$@"; do
        [ $((SECONDS - begin)) -lt "$patience" ] || fail "$what took more than $patience s"
        sleep 1
    done
}

healthy() {
    local container
    for container in $(running); do
        [ "$($docker inspect --format '{{.RestartCount}}' "$container")" -lt 5 ] || fail "a node does not get up"
        [ "$($docker inspect --format '{{.State.Health.Status}}' "$container")" = healthy ] || return 1
    done
}

counted() { [ "$(running | wc -l)" = "$1" ]; }

# A line of a container's node: number of its directory, peer id, rounds, last checkpoint, external groups, peers,
# mean reward of its first and last 50 rounds, MiB of memory.
report() {
    ask "$1" python - <<'EOF'
import os
from pathlib import Path

from node.datadir import DataDir
from node.record import MetricsFile
from node.status import gather

path = Path(os.environ["SWARMNODE_NODE__DATA_DIR"])
status, records = gather(path), list(MetricsFile(DataDir(path).metrics_path).read())
rewards = [record.reward_local for record in records] or [0.0]
mean = lambda values: sum(values) / len(values)
memory = [Path("/sys/fs/cgroup", name) for name in ("memory.current", "memory/memory.usage_in_bytes")]
print(
    path.resolve().name, (status.node_id or "-")[-8:], status.rounds, max(status.checkpoints, default=0),
    sum(record.external_groups for record in records), status.swarm.connected if status.swarm else 0,
    f"{mean(rewards[:50]):.3f}", f"{mean(rewards[-50:]):.3f}",
    next((int(file.read_text()) // 2**20 for file in memory if file.exists()), 0),
)
EOF
}

field() { report "$1" | cut -d' ' -f"$2"; }
reports() { for container in $(running); do report "$container"; done | sort -n; }
ids() { reports | cut -d' ' -f2 | sort; }

all_learn_from_others() {
    local line
    while read -r -a line; do
        [ "${line[4]}" -gt 0 ] && [ "${line[5]}" -gt 0 ] || return 1
    done < <(reports)
}

further() { [ "$(field "$1" 3)" -gt "$2" ]; }
again() { [ "$($docker inspect --format '{{.RestartCount}}' "$1")" -gt "$2" ]; }

# Kill the node in a container while it samples or learns. The container goes with it, and so does what runs here.
kill_in_round() {
    ask "$1" python - <<'EOF' || true
import os
import signal
import time
from pathlib import Path

from node.api.client import NodeClient

client = NodeClient.at(Path(os.environ["SWARMNODE_NODE__DATA_DIR"]))
while (status := client.get("status"))["phase"] not in ("generate", "update"):
    time.sleep(0.05)
print(f"round {status['round'] + 1}, {status['phase']}", flush=True)
os.kill(status["pid"], signal.SIGKILL)
EOF
}

# Whether every data directory of the volume has a checkpoint of its last recorded round; no node runs meanwhile.
all_saved() {
    $compose run --rm -T --no-deps --entrypoint python node - <<'EOF' >&2
import sys
from pathlib import Path

from node.status import gather

states = [gather(path) for path in sorted(Path("/data").glob("[0-9]*"))]
for state in states:
    print(f"{state.data_dir}: {state.rounds} rounds, checkpoints after {state.checkpoints}")
sys.exit(any(state.rounds != max(state.checkpoints, default=0) for state in states))
EOF
}

all_met() {
    local line
    while read -r -a line; do [ "${line[5]}" -ge "$1" ] || return 1; done < <(reports)
}

elsewhere=${COMPOSE_PROJECT_NAME}-elsewhere
finish() {
    [ "$keep" = yes ] || $compose down --volumes >&2
    $docker network rm "$elsewhere" >/dev/null 2>&1 || true
}

if [ "$build" = yes ]; then
    begin=$(now)
    $compose build node >&2
    row "build" "$(since "$begin")"
fi
trap finish EXIT
trap 'say "failed in line $LINENO"' ERR

begin=$(now)
$compose up --detach --no-build --scale node="$nodes" node >&2
await "$nodes containers" counted "$nodes"
row "up, $nodes containers created" "$(since "$begin")"
await "good health" healthy
row "all healthy after" "$(since "$begin")"
await "rounds with groups of others" all_learn_from_others
row "all trained on groups of others after" "$(since "$begin")"

victim=$(running | sed -n 2p)
restarts=$($docker inspect --format '{{.RestartCount}}' "$victim")
$docker exec "$victim" swarmnode checkpoint >&2
before=$(report "$victim")
begin=$(now)
where=$(kill_in_round "$victim")
await "the restart" again "$victim" "$restarts"
await "good health" healthy
await "another round" further "$victim" "$(cut -d' ' -f3 <<<"$before")"
after=$(report "$victim")
[ "$(cut -d' ' -f2 <<<"$before")" = "$(cut -d' ' -f2 <<<"$after")" ] || fail "another identity after the kill"
resumed=$($docker logs "$victim" 2>&1 | grep -o 'resuming after round [0-9]*' | tail -1)
[ -n "$resumed" ] || fail "the killed node did not go on from a checkpoint"
row "node killed in $where" "back with its identity, $resumed; next round after $(since "$begin")"

if [ "$more" -gt 0 ]; then
    begin=$(now)
    $compose up --detach --no-build --scale node=$((nodes + more)) node >&2
    await "$((nodes + more)) containers" counted $((nodes + more))
    await "good health" healthy
    await "rounds with groups of others" all_learn_from_others
    row "scaled to $((nodes + more))" "the new ones trained on groups of others after $(since "$begin")"
fi
known=$(ids)
$compose up --detach --no-build --scale node="$nodes" node >&2
await "$nodes containers" counted "$nodes"

# What each node has, by its identity, before all of it is taken down.
declare -A done_before
while read -r -a line; do done_before[${line[1]}]=${line[2]}; done < <(reports)
network=${COMPOSE_PROJECT_NAME}_default
subnet=$($docker network inspect --format '{{(index .IPAM.Config 0).Subnet}}' "$network")
slowest=0
for container in $(running); do
    begin=$(now)
    $docker stop --time 30 "$container" >/dev/null
    slowest=$(awk -v a="$begin" -v b="$(now)" -v s="$slowest" 'BEGIN { d = b - a; print (d > s ? d : s) }')
    status=$($docker inspect --format '{{.State.ExitCode}}' "$container")
    [ "$status" = 0 ] || fail "a node ended with status $status when it was told to stop"
done
awk -v s="$slowest" 'BEGIN { exit s >= 10 }' || fail "docker stop took $slowest s"
all_saved || fail "a node did not save its last round when it was told to stop"
row "docker stop, the slowest of $nodes" "$(printf '%.1f s' "$slowest"), each with its last round saved"

# The networks of the next swarm cannot lie where the last one's did, so every address is another.
$compose down >&2
$docker network create --subnet "$subnet" "$elsewhere" >/dev/null
begin=$(now)
$compose up --detach --no-build --scale node="$nodes" node >&2
await "$nodes containers" counted "$nodes"
await "good health" healthy
await "all to have met" all_met $((nodes - 1))
while read -r -a line; do
    [ "${line[2]}" -ge "${done_before[${line[1]}]:--1}" ] || fail "node ${line[1]} has lost rounds"
    [ -n "${done_before[${line[1]}]:-}" ] || [ "$(grep -c "^${line[1]}$" <<<"$known")" = 1 ] || fail "a new identity"
done < <(reports)
moved=$($docker network inspect --format '{{(index .IPAM.Config 0).Subnet}}' "$network")
row "down and up, from $subnet to $moved" "same identities, no round lost; all met after $(since "$begin")"

printf '\n| step | result |\n|---|---|\n'
for line in "${rows[@]}"; do printf '| %s |\n' "${line/|/ | }"; done
printf '\n| directory | peer id ends in | rounds | saved | groups of others | peers | reward, first 50 | last 50 | MiB |\n'
printf '|---|---|---|---|---|---|---|---|---|\n'
reports | sed 's/ / | /g; s/^/| /; s/$/ |/'
printf '\n'
$docker image ls --format 'image {{.Repository}}: {{.Size}}' "${SWARMNODE_IMAGE:-swarmnode}"
