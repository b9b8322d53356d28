# Lockstep with CUDA: the environment of `make install`, as an image.
#
#   docker build -t lockstep .
#   ISOLATION="--cap-add SYS_ADMIN --security-opt apparmor=unconfined --security-opt no-new-privileges"
#   docker run --rm --gpus all --ipc=host $ISOLATION -v "$PWD/runs:/lockstep/runs" lockstep train
#   docker run --rm --gpus all --ipc=host -v "$PWD/runs:/lockstep/runs" lockstep gpu-check
#   docker run --rm --ipc=host $ISOLATION lockstep test  # without GPUs: with them, tests of CPU engines are skipped
#   docker run --rm -it --gpus all --ipc=host $ISOLATION --entrypoint bash lockstep
#
# Arguments are make targets. --ipc=host: ranks and engine exchange tensors through shared memory, for which Docker's
# 64 MB are too little. A mounted directory must be writable by user 1000. ISOLATION: programs of a model run in
# namespaces (`code_tests`), which Docker's seccomp profile allows only with this capability, and whose mounts its
# AppArmor profile refuses. User 1000 does not get the capability, and the rest of the seccomp profile stays, unlike with
# seccomp=unconfined.
#
# devel instead of runtime: DeepSpeed and the kernels of vLLM compile at first use and need nvcc. The torch 2.13 wheels
# are built for CUDA 13.0, which needs a driver of version 580 or later on the host.
# The digest is that of the tag 13.0.2-devel-ubuntu24.04, for x86_64 and aarch64.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6

# Unpinned: Ubuntu removes superseded versions from its archive, so a pinned build would stop working.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git g++ make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 1000 -g 1000 /lockstep

# Training and the tools of a model do not run as root. Ubuntu 24.04 has this user ("ubuntu").
USER 1000:1000
WORKDIR /lockstep

# First only the files that determine the packages, so that a change of the code does not install them again. A build
# has no GPU, so the accelerator is named. The cache lies outside of the home directory: its parents would belong to
# root, and the compile caches of torch and vLLM need the home directory at run time.
COPY --chown=1000:1000 pyproject.toml README.md ./
COPY --chown=1000:1000 requirements requirements
COPY --chown=1000:1000 scripts/install.sh scripts/install.sh
RUN --mount=type=cache,target=/var/cache/pip,uid=1000,gid=1000 \
    mkdir lockstep && touch lockstep/__init__.py \
    && ACCELERATOR=cuda PIP_CACHE_DIR=/var/cache/pip bash scripts/install.sh

COPY --chown=1000:1000 . .

# Later make targets use the environment without installing.
ENV SKIP_INSTALL=1

# No HEALTHCHECK: this is a job, not a service. Its exit code tells its success, and while it runs, the step deadline
# and the heartbeat file in the run directory show progress.
ENTRYPOINT ["make"]
CMD ["help"]
