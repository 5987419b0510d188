"""What can be tested of docker/ without an engine: copied files exist, nothing else gets in, images are pinned, secrets have no default."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
POOLS = sorted((ROOT / "docker/pools").glob("*.json"))
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
PINNED = re.compile(r"[a-z0-9./-]+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}")


def instructions(path: Path) -> list[str]:
    """The instructions of a Dockerfile, continued lines joined."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def arguments(path: Path) -> dict[str, str]:
    """The build arguments with a default."""
    return dict(line.removeprefix("ARG ").split("=", 1) for line in instructions(path) if re.match(r"ARG \w+=", line))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_bases_are_pinned_and_the_last_user_is_nobody_special(path: Path) -> None:
    defaults, stages = arguments(path), set()
    for line in instructions(path):
        if line.startswith("FROM "):
            image, *name = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], line.removeprefix("FROM ")).split(" AS ")
            assert image in stages or PINNED.fullmatch(image), f"{image} has no digest"
            stages.update(name)
    users = [line for line in instructions(path) if line.startswith("USER ")]
    assert users[-1:] == ["USER 10001"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_is_copied_exists_and_is_let_in(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*", "all is kept out first, .venv and .state too"
    let_in = {line.removeprefix("!").split("/")[0] for line in ignored if line.startswith("!")}
    assert let_in & {".venv", ".state", ".git", "docker", "tests"} == set()
    copied = [line.removeprefix("COPY ").split()[:-1] for line in instructions(path) if line.startswith("COPY ") and "--from=" not in line]
    for source in sum(copied, []):
        assert list(ROOT.glob(source.replace("${LOCK}", "gpu"))), f"{source} doesn't exist"
        assert source.split("/")[0] in let_in, f"{source} is kept out by .dockerignore"


def test_the_images_have_all_that_a_run_reads() -> None:
    """Every folder with code of the two programs, and nothing but the locks that are installed."""
    for path in DOCKERFILES:
        text = path.read_text()
        wanted = ("recipes", "parallel_r1", "tasks", "flows", "pyproject.toml prefect.yaml pipeline_config.yaml")
        assert [name for name in wanted if f"COPY {name}" not in text] == []


def services() -> list[tuple[str, dict[str, Any]]]:
    return list(COMPOSE["services"].items())


@pytest.mark.parametrize(("name", "service"), services(), ids=[name for name, _ in services()])
def test_services_are_whole(name: str, service: dict[str, Any]) -> None:
    if "build" in service:
        assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).resolve() in DOCKERFILES
    else:
        assert PINNED.fullmatch(service["image"]), service["image"]
    assert name == "deployments" or "healthcheck" in service
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), "published on loopback alone"
    named = {volume.split(":")[0] for volume in service.get("volumes", ())}
    assert named <= set(COMPOSE["volumes"])
    assert set(service.get("depends_on", {})) <= set(COMPOSE["services"])
    for variable, value in service.get("environment", {}).items():
        if re.search(r"PASSWORD|SECRET|ACCESS_KEY|AUTH|TOKEN|API_KEY|CONNECTION_URL", variable):
            assert re.search(r"\$\{\w+(:\?[^}]+|:-)\}", value), f"{variable}: from the environment, and required or empty"


def test_every_variable_of_compose_is_in_the_example() -> None:
    wanted = set(re.findall(r"\$\{(\w+)", (ROOT / "docker/compose.yaml").read_text()))
    example = dict(line.split("=", 1) for line in (ROOT / "docker/example.env").read_text().splitlines() if "=" in line and line[0] != "#")
    assert set(example) == wanted
    assert set(example.values()) == {""}, "the example holds no value"
    ignored = subprocess.run(["git", "check-ignore", "-q", "docker/.env"], cwd=ROOT)
    assert ignored.returncode == 0, "git would take docker/.env"


@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_pools_name_variables_that_they_have(path: Path) -> None:
    """Prefect puts variables in place of {{ }}; one that isn't declared would stay empty, one that isn't used would do nothing."""
    pool = json.loads(path.read_text())
    used = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", json.dumps(pool["job_configuration"])))
    assert used <= set(pool["variables"]["properties"]) | {"command"}
    assert set(pool["variables"]["properties"]) - used == set()


def test_pools_ask_for_gpus() -> None:
    kubernetes, docker, slurm = (json.loads((ROOT / f"docker/pools/{name}.json").read_text()) for name in ("kubernetes", "docker", "slurm"))
    (container,) = kubernetes["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "{{ gpus }}"
    assert docker["variables"]["properties"]["container_create_kwargs"]["default"]["device_requests"][0]["capabilities"] == [["gpu"]]
    assert "--gpus-per-node={{ gpus }}" in slurm["job_configuration"]["command"]
