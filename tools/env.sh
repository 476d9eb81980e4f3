#!/bin/sh
# Makes .venv from requirements.lock, or brings an existing one up to date; returns at once when nothing changed.
#   PYTHON          the Python to make it from, 3.11 or 3.12; default: the first of python3, python3.11, python3.12 that fits
#   TORCH_PIP_ARGS  more arguments for pip when it installs torch, for example '--index-url URL' of an index with CPU builds
set -eu
cd "$(dirname "$0")/.."

torch_version=2.13.0
python=.venv/bin/python
stamp=.venv/hotspa-env-stamp
# The path is in the key because the editable install points to it; PYTHON, because another one may be asked for.
key="$PWD ${PYTHON-} $(cat requirements.lock pyproject.toml tools/env.sh | cksum)"

die() { echo "make env: $*" >&2; exit 1; }
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
fits() { case $(version "$1") in 3.11 | 3.12) ;; *) return 1 ;; esac; }
has_torch() {
    "$1" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.11 python3.12}; do
        if fits "$candidate"; then echo "$candidate"; return; fi
    done
    die "needs Python 3.11 or 3.12, found neither as ${PYTHON:-python3, python3.11 or python3.12}; name one: make env PYTHON=/path/to/python3.11"
}

make_venv() {
    base=$(find_python)
    echo "make env: making .venv with $base (Python $(version "$base"))"
    "$base" -m venv .venv || { rm -rf .venv; die "$base -m venv failed (on Debian and Ubuntu it needs the package python3-venv)"; }
    if has_torch "$base"; then
        echo "make env: taking up the torch of $base"
        # Behind .venv's own packages on the path, so that the locked versions win. Also right when $base is a virtual environment itself.
        "$base" -c '
import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")' >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base-python.pth"
    fi
}

if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then exit 0; fi

[ -e .venv ] || make_venv
fits "$python" || die ".venv holds no working Python 3.11 or 3.12; remove it (make clean) and try again"
[ -z "${PYTHON-}" ] || [ "$(version "$PYTHON")" = "$(version "$python")" ] ||
    die ".venv holds Python $(version "$python"), PYTHON is $(version "$PYTHON"); remove .venv (make clean) and try again"

pip_install() { "$python" -m pip install --disable-pip-version-check "$@" || die "pip could not install the environment, see above"; }

echo "make env: installing the locked packages (a few minutes the first time)"
pip_install --quiet --no-deps --requirement requirements.lock
if ! has_torch "$python"; then
    echo "make env: installing torch $torch_version; the CPU build is enough (TORCH_PIP_ARGS='--index-url URL' chooses where it comes from)"
    # shellcheck disable=SC2086  # TORCH_PIP_ARGS is a list of words
    pip_install --constraint requirements.lock ${TORCH_PIP_ARGS-} "torch==$torch_version"
fi
pip_install --quiet --no-deps --no-build-isolation --editable .
echo "$key" >"$stamp"
echo "make env: ready, try .venv/bin/hotspa --help"
