# The orchestrator environment: Prefect server, work pool cpu, everything that runs no model. Built from the project's folder:
#   docker build --file docker/orchestrator.Dockerfile --tag parallel-r1-orchestrator .
ARG PYTHON=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${PYTHON} AS environment
WORKDIR /opt/parallel-r1
COPY requirements/orchestrator.txt requirements/
RUN python3.11 -m venv .venv/orchestrator \
 && .venv/orchestrator/bin/python -m pip install --no-cache-dir --no-deps --requirement requirements/orchestrator.txt

FROM ${PYTHON}
RUN useradd --uid 10001 --create-home parallel \
 && install --directory --owner=parallel --group=parallel /opt/parallel-r1/.state
WORKDIR /opt/parallel-r1
COPY --from=environment /opt/parallel-r1/.venv .venv
COPY pyproject.toml prefect.yaml pipeline_config.yaml ./
COPY recipes recipes
COPY parallel_r1 parallel_r1
COPY tasks tasks
COPY flows flows
ENV PATH=/opt/parallel-r1/.venv/orchestrator/bin:$PATH PARALLEL_R1_STATE=/opt/parallel-r1/.state PYTHONUNBUFFERED=1 DO_NOT_TRACK=1
USER 10001
VOLUME /opt/parallel-r1/.state
CMD ["python", "-m", "flows.ui", "--help"]
