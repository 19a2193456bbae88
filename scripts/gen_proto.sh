#!/usr/bin/env bash
# Generate metis/api from proto/ with betterproto2.
#
#   scripts/gen_proto.sh           write metis/api anew
#   scripts/gen_proto.sh --check   fail when metis/api is not what proto/ gives
#
# Needs grpcio-tools and betterproto2-compiler (the "proto" dependency group)
# for the interpreter in $PYTHON, else python3.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

case "${1:-}" in
  "" | --check) ;;
  *) echo "usage: $0 [--check]" >&2; exit 2 ;;
esac

cd "$root/proto"
# protoc finds its plugins on PATH; the compiler sits beside the interpreter.
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH" \
  "$python" -m grpc_tools.protoc -I . \
  --python_betterproto2_out="$out" \
  --python_betterproto2_opt=client_generation=async,server_generation=async \
  $(find . -name '*.proto' | LC_ALL=C sort) 2>"$out.log" >&2 || { cat "$out.log" >&2; rm -f "$out.log"; exit 1; }
rm -f "$out.log"

if [ "${1:-}" = --check ]; then
  if ! diff -r -u -x __pycache__ "$root/metis/api" "$out"; then
    echo "metis/api is stale: run scripts/gen_proto.sh and commit the result" >&2
    exit 1
  fi
  echo "metis/api is what proto/ gives"
else
  rm -rf "$root/metis/api"
  mv "$out" "$root/metis/api"
  chmod 755 "$root/metis/api"
fi
