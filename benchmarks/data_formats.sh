#!/usr/bin/env bash
# Reads files of many formats with the real command, and keeps its report.
# Usage: BASE=build/nano/base SHARED=../shared/data benchmarks/data_formats.sh OUT_FOLDER
set -euo pipefail
out=$1
sources=()
while IFS= read -r file; do
  sources+=(--source "$file")
done < <(find "$SHARED" -type f ! -name README.md | sort)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${MTP:-mtp}" data prepare --base "$BASE" "${sources[@]}" --out "$work/data" --max-length 4096 \
  --allow-missing-tools --json >"$out/report.json"
# Without the option the traces that hold no tool schemas are too many refused rows.
if "${MTP:-mtp}" data prepare --base "$BASE" "${sources[@]}" --out "$work/strict" \
  2>"$out/refused_without_schemas.txt"; then
  echo "calls without schemas were not refused" >&2
  exit 1
fi
