# The image of a rank: Python, torch, the lab. Layers stand in the order of change, the rarest first. The plain
# syntax is on purpose: Compose v1 builds it too, without BuildKit.
ARG BASE_IMAGE=python:3.11-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

# HOME and USER: the rank's uid is the host's, which has no entry in this image's passwd.
# PYTHONPATH: the command `distlab` looks for the lab where it is installed, and here it lies in the working folder.
ENV HOME=/tmp USER=lab PYTHONPATH=/lab PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /lab

# The official image carries no bytecode of the standard library, and a rank's root file system is read-only:
# without this each rank would compile what it imports at each start. Some test data in it is bad syntax by intent.
RUN python -m compileall -q -j 0 "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" > /dev/null || true

COPY install constraints.txt ./
COPY compose/requirements.lock compose/
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN ./install --into python torch

# With no package beside it pyproject.toml installs the dependencies alone; the code is found in the working folder.
COPY pyproject.toml ./
RUN ./install --into python project

COPY workers workers
COPY experiments experiments
COPY engines engines
COPY distlab distlab
# runs/: for whoever mounts nothing there.
RUN python -m compileall -q workers experiments distlab && mkdir runs

ENTRYPOINT ["/lab/workers/entrypoint.sh"]
CMD ["python", "-m", "workers"]
