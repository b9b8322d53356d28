# Lockstep with CUDA: the environment of `make install`, as an image.
#
#   docker build -t lockstep .
#   docker run --rm --gpus all --ipc=host -v "$PWD/runs:/lockstep/runs" lockstep train
#   docker run --rm --gpus all --ipc=host lockstep test
#   docker run --rm -it --gpus all --ipc=host --entrypoint bash lockstep
#
# Arguments are make targets. --ipc=host: ranks and engine exchange tensors through shared memory, and Docker's 64 MB
# are too little. A mounted directory must be writable by user 1000.
#
# devel and not runtime: DeepSpeed and the kernels of vLLM compile at first use and need nvcc. CUDA 13.0 is what the
# torch 2.13 wheels are built for; the driver of the host must be recent enough for it.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# Unpinned: Ubuntu removes superseded versions from its archive, so a pinned build would stop working.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git g++ make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 1000 -g 1000 /lockstep

# Training, and what a model does with its tools, does not run as root. Ubuntu 24.04 brings this user along ("ubuntu").
USER 1000:1000
WORKDIR /lockstep

# First only what decides the packages, so that a change of the code does not install them again. A build sees no GPU,
# so the accelerator is named. The cache lies outside the home directory: its parents would belong to root, and the
# compile caches of torch and vLLM go beside it at run time.
COPY --chown=1000:1000 pyproject.toml README.md ./
COPY --chown=1000:1000 scripts/install.sh scripts/install.sh
RUN --mount=type=cache,target=/var/cache/pip,uid=1000,gid=1000 \
    mkdir trainer rollout rewards demo \
    && touch trainer/__init__.py rollout/__init__.py rewards/__init__.py demo/__init__.py \
    && ACCELERATOR=cuda PIP_CACHE_DIR=/var/cache/pip bash scripts/install.sh

COPY --chown=1000:1000 . .

# From here on the environment is used as it is.
ENV SKIP_INSTALL=1

# No HEALTHCHECK: this is a job and not a service. Its exit code is its health, and while it runs the step deadline and
# the heartbeat file in the run directory tell whether it moves.
ENTRYPOINT ["make"]
CMD ["help"]
