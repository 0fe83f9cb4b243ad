# Sourced by scripts/demo and scripts/test. ensure_venv DIR [EXTRA] makes a virtual environment in the
# repository's folder DIR, with the pinned dependencies and the project itself, and leaves a finished one alone.
# It says what it does, and exits with a reason when it cannot. PYTHON names the interpreter to use.
#
# A stamp in the environment says what it was made from. A lock makes two calls at the same time wait for each
# other; it ends with the process that has it.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# The first interpreter that is new enough.
find_python() {
    local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed; found: $("${PYTHON:-python3}" --version 2>/dev/null || echo none)." \
        "Set PYTHON to a newer interpreter if there is one."
}

# What an environment is made from: interpreter, place, dependencies.
stamp_of() { # PYTHON EXTRA
    "$1" - "$REPOSITORY" "$2" <<'PYTHON'
import hashlib, pathlib, sys
repository, extra = sys.argv[1:]
parts = [sys.version, repository, extra]
parts += [pathlib.Path(repository, name).read_text() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PYTHON
}

ensure_venv() { # DIR [EXTRA]
    local venv="$REPOSITORY/$1" extra="${2:-}" python stamp
    python=$(find_python) || exit 1
    stamp=$(stamp_of "$python" "$extra") || die "cannot read pyproject.toml and constraints.txt"
    exec 9>"$venv.lock"
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null || {
        echo "${0##*/}: waiting for another set-up of $1"
        "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || die "cannot lock $venv.lock"
    }
    if [[ $(cat "$venv/stamp" 2>/dev/null) != "$stamp" ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
        echo "${0##*/}: making $1 with $("$python" --version); the first time takes a few minutes"
        rm -rf "$venv"
        "$python" -m venv "$venv" || die "cannot make a virtual environment." \
            "On Debian and Ubuntu, install the package python3-venv and try again."
        "$venv/bin/python" -m pip install --disable-pip-version-check \
            -c "$REPOSITORY/constraints.txt" -e "$REPOSITORY${extra:+[$extra]}" \
            || die "the dependencies could not be installed; pip says why above"
        echo "$stamp" >"$venv/stamp"
    fi
    exec 9>&-
}
