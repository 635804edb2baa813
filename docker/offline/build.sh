#!/usr/bin/env bash
# Builds the image of a node where packages come over the host's own network and certificates: a mirror behind a private
# authority, or a proxy on the loopback interface. Needs BuildKit, which the engine has in it.
#
#   docker/offline/build.sh [further arguments of docker build]
#
# The certificates are those that pip is told to trust (`pip config set global.cert`), or SSL_CERT_FILE. The folder that pip
# is told to look at (`pip config set global.find-links`), or WHEELS_DIR, is taken along, as it may hold the one build of
# torch without CUDA that there is. Nothing of this stays in the image.
set -euo pipefail
cd "$(dirname "$0")/../.."
docker=${DOCKER:-docker}
certificates=${SSL_CERT_FILE:-$(python3 -m pip config get global.cert 2>/dev/null || true)}
wheels=${WHEELS_DIR:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}

arguments=()
if [ -d "$wheels" ]; then
    tar -C "$wheels" -c . | $docker import - swarmnode-wheels >/dev/null
    arguments+=(--build-arg WHEELS=swarmnode-wheels)
fi
if [ -f "$certificates" ]; then
    arguments+=(--secret "id=certificates,src=$certificates")
fi
DOCKER_BUILDKIT=1 exec $docker build --network host "${arguments[@]}" \
    --build-arg "ENGINE=${ENGINE:-transformers}" --file docker/Dockerfile --tag "${SWARMNODE_IMAGE:-swarmnode}" "$@" .
