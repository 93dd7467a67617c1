#!/usr/bin/env bash
# Rewrites requirements/cpu.txt from pyproject.toml; needs uv. Set PIP_FIND_LINKS where the CPU torch wheel lies on disk.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec uv pip compile pyproject.toml --extra cpu --extra dev --override requirements/exclude.txt --python-version 3.11 \
    --no-header --no-emit-index-url --no-emit-find-links \
    ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} -o requirements/cpu.txt "$@"
