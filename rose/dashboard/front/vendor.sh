#!/usr/bin/env bash
# Copies the page's third-party files, of exactly the versions in package-lock.json, to where they are served from.
# Needed only to change a version; the copies are part of the source, and a test holds them to their hashes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/package.json" "$here/package-lock.json" "$work"
npm --prefix "$work" ci --ignore-scripts --no-audit --no-fund --silent
vendor=$here/../assets/vendor
install -m 644 "$work/node_modules/htm/preact/standalone.module.js" "$vendor/htm-preact.js"
install -m 644 "$work/node_modules/htm/LICENSE" "$vendor/LICENSE.htm"
# Reports carry uPlot too: one copy serves both.
uplot=$here/../../report/assets/uplot
install -m 644 "$work/node_modules/uplot/dist/uPlot.iife.min.js" "$work/node_modules/uplot/dist/uPlot.min.css" "$work/node_modules/uplot/LICENSE" "$uplot"
