#!/usr/bin/env bash
# Makes the base image where no image registry can be reached, from a mirror of Debian's packages, under the name that the
# Dockerfile asks for. Needs debootstrap, and root.
#
#   docker/offline/base.sh
#
# SUITE (bookworm) and MIRROR (debootstrap's own choice) say what of.
set -euo pipefail
docker=${DOCKER:-docker} suite=${SUITE:-bookworm}
name=${BASE:-debian:$suite-slim}

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates "$suite" "$root" ${MIRROR:+"$MIRROR"}
# What the official slim image leaves out, too.
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/usr/share/{doc,info,locale,man}/*
tar --numeric-owner -C "$root" -c . | $docker import --change 'CMD ["bash"]' - "$name"
