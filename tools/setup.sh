#!/bin/sh
# Make the virtual environment $1 with an editable install of fedthe and the extras $2. Nothing outside it changes,
# except that root gets Debian's python3-venv installed where it is missing.
set -eu
venv=$1
extras=$2

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "fedthe needs Python 3.10 to 3.13; name one with: make PYTHON=/path/to/python3" >&2
    exit 2
}

python=$(find_python)
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends python3-venv
    else
        echo "$python has no venv module; on Debian: apt-get install python3-venv" >&2
        exit 2
    fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing fedthe and its dependencies into $venv (the first time takes a minute or two)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
