#!/bin/sh
# A federation of real processes on this machine, compared with a simulation: loopback.sh [METHOD...]
set -e
here=$(dirname "$0")
python=$here/../../.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" "$here/loopback.py" "$@"
