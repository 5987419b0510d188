# A worker of the pool gpu: both environments, since Prefect runs the flow and starts each stage's program in the worker environment.
#   docker build --file docker/worker.Dockerfile --tag parallel-r1-worker .
# On a machine without a GPU: --build-arg BASE=<the image of PYTHON> --build-arg LOCK=cpu
ARG PYTHON=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
# base, not runtime or devel: the lock's wheels bring their own CUDA libraries, of CUDA 13.0 too; driver 580 or newer
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:2ab6381d970b211fb93853796dc6707eb8a72575a375c422b17cf4d8b2641701

FROM ${PYTHON} AS orchestrator
WORKDIR /opt/parallel-r1
COPY requirements/orchestrator.txt requirements/
RUN python3.11 -m venv .venv/orchestrator \
 && .venv/orchestrator/bin/python -m pip install --no-cache-dir --no-deps --requirement requirements/orchestrator.txt

FROM ${PYTHON} AS worker
ARG LOCK=gpu
WORKDIR /opt/parallel-r1
COPY requirements/worker-${LOCK}.txt requirements/
RUN python3.11 -m venv .venv/worker \
 && .venv/worker/bin/python -m pip install --no-cache-dir --no-deps --requirement "requirements/worker-${LOCK}.txt"

FROM ${PYTHON} AS python

FROM ${BASE}
# Ubuntu 24.04 has no Python 3.11: the one of the official image is used, with the libraries it is linked with.
# gcc and libc6-dev: Triton compiles its launchers when it first runs.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends \
    ca-certificates gcc libbz2-1.0 libc6-dev libexpat1 libffi8 liblzma5 libncursesw6 libreadline8 libsqlite3-0 libssl3 libuuid1 zlib1g \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home parallel \
 && install --directory --owner=parallel --group=parallel /opt/parallel-r1/.state
COPY --from=python /usr/local /usr/local
RUN ldconfig && python3.11 -c "import bz2, ctypes, lzma, pyexpat, readline, sqlite3, ssl, uuid, zlib"
WORKDIR /opt/parallel-r1
COPY --from=orchestrator /opt/parallel-r1/.venv .venv
COPY --from=worker /opt/parallel-r1/.venv .venv
COPY pyproject.toml prefect.yaml pipeline_config.yaml ./
COPY recipes recipes
COPY parallel_r1 parallel_r1
# the project too, so that every vLLM process finds its plugin
RUN .venv/worker/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation --no-index --editable .
COPY tasks tasks
COPY flows flows
ENV PATH=/opt/parallel-r1/.venv/orchestrator/bin:$PATH PARALLEL_R1_STATE=/opt/parallel-r1/.state PYTHONUNBUFFERED=1 DO_NOT_TRACK=1 HF_HOME=/opt/parallel-r1/.state/huggingface
USER 10001
VOLUME /opt/parallel-r1/.state
CMD ["python", "-m", "flows.ui", "--help"]
