#!/usr/bin/env bash
# The operator's environment in .venv, from requirements.lock: `operator`, `dev` (and what tests and lint need) or
# `trainer-test` (what tests/trainer needs, beside the application's environment). `skypilot`: SkyPilot's own, in
# .venv-skypilot, because its pins are not the operator's. Prints nothing when it is there.
# Two at once in one checkout build it once: the second waits. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.venv

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    version=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo missing)
    echo "Lanyard needs Python 3.11 or later; $python is $version." >&2
    echo "Install one and name it: make PYTHON=python3.12 ..." >&2
    exit 1
}
# A stamp is named after what was installed, so another lock file or interpreter means a new environment.
interpreter=$("$python" -c 'import sys; print(sys.version, sys.base_prefix)')
stamp() { echo "$venv/.$1-$({ echo "$interpreter"; cat "${@:2}"; } | sha256sum | cut -c1-16)"; }

# install LOCK [pip's options]: exact versions and hashes; pip is heard only when it fails.
install() {
    "$venv/bin/python" -m pip install --quiet --progress-bar off --disable-pip-version-check --no-deps \
        --require-hashes -r "$@" >"$venv/pip.log" 2>&1 || {
        tail -n 20 "$venv/pip.log" >&2
        echo "installing $1 failed (above; all of it in $venv/pip.log)" >&2
        exit 1
    }
}

build_operator() {
    local done_
    done_=$(stamp operator requirements.lock)
    [ -e "$done_" ] && return
    echo "operator environment: building $venv (about a minute)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || {
        echo "$python -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    }
    install requirements.lock
    "$venv/bin/python" -m pip check --disable-pip-version-check >/dev/null
    touch "$done_"
}

build_dev() {
    local done_
    done_=$(stamp dev requirements.lock requirements-dev.lock)
    [ -e "$done_" ] && return
    echo "operator environment: adding what tests and lint need"
    install requirements-dev.lock
    rm -f "$venv"/.dev-*
    touch "$done_"
}

build_trainer_test() {
    local done_
    done_=$(stamp trainer-test requirements.lock requirements-trainer-test.lock)
    [ -e "$done_" ] && return
    rm -rf "$venv/trainer-test"
    install requirements-trainer-test.lock --target "$venv/trainer-test"
    touch "$done_"
}

build_skypilot() {
    local done_
    venv=.venv-skypilot
    done_=$(stamp skypilot requirements-skypilot.lock)
    [ -e "$done_" ] && return
    echo "SkyPilot's environment: building $venv (about a minute)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    install requirements-skypilot.lock
    "$venv/bin/python" -m pip check --disable-pip-version-check >/dev/null
    touch "$done_"
}

exec 9>.venv.lock
flock 9
if [ "${1:-}" = skypilot ]; then
    build_skypilot
    exit
fi
build_operator
case ${1:-operator} in
operator) ;;
dev) build_dev ;;
trainer-test) build_trainer_test ;;
*)
    echo "operator, dev, trainer-test or skypilot" >&2
    exit 2
    ;;
esac
