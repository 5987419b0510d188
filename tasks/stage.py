"""What makes a function a stage: a cached, locked Prefect task whose result is a small reference into the artifact store.

    @stage("filter", version=1, show=show_funnel)
    def filter_trajectories(work: Work, config: FilterConfig, trajectories: ArtifactRef) -> Metrics: ...

    ref = filter_trajectories(run, config.filter, trajectories=ref)

The function fills `work.out` and returns the artifact's headline numbers. It runs only when the store has no whole artifact of
this key. The store is the truth: Prefect's record of a result is written, but an artifact is only believed by its manifest, which
is read again once the lock is held, so that two runs at once build each thing once.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture
from prefect.states import Completed, State
from prefect.transactions import IsolationLevel
from pydantic import BaseModel

from parallel_r1.config import LaunchConfig, PipelineConfig, Resources
from parallel_r1.jobs import Job, write_durably
from parallel_r1.store import ArtifactRef, Manifest, Store, StoreError, flatten, identity, key_of
from tasks.launch import command, environment
from tasks.locks import FlockManager
from tasks.places import PROJECT, state_folder, store_root
from tasks.progress import Progress, say, slug
from tasks.show import collecting, keep, kept, post, with_inputs
from tasks.supervise import program_environment, supervise
from tasks.uploads import Uploads, wanted

Metrics = Mapping[str, float]
Inputs = Mapping[str, ArtifactRef | Mapping[str, ArtifactRef]]
Show = Callable[[str, ArtifactRef, Path], None]
GPU = "gpu"
"""Tag of the tasks that run a model, and the name of the pool for them. `make ui` limits the tag to one task at a time."""


@dataclass(frozen=True)
class Run:
    """What all stages of a run share."""

    store: Store
    seed: int
    resources: Resources
    state: Path
    offline: bool
    slots: threading.Semaphore
    """One for each stage process that may run at once."""
    rebuild: frozenset[str] = frozenset()
    """Stages, or single steps by title, that are built anew even when the store has them."""
    rebuilt: set[str] = field(default_factory=set)
    """Titles that need no rebuilding any more."""
    titles: dict[str, str] = field(default_factory=dict)
    """What this run calls its artifacts, by URI."""

    @classmethod
    def of(cls, config: PipelineConfig, rebuild: Iterable[str] = ()) -> Run:
        """The run that a config asks for; relative paths in it are relative to the project."""
        slots = threading.Semaphore(config.resources.processes)
        return cls(
            Store(store_root(config.store)), config.seed, config.resources, state_folder(), not uses_hub(config), slots, frozenset(rebuild)
        )


def uses_hub(config: PipelineConfig) -> bool:
    """Whether anything in the config lies on the Hugging Face hub."""
    sources = [*config.prepare.train.values(), *config.prepare.evaluation.values(), config.student]
    teacher = config.generate.teacher if config.generate else None
    return any(part.type in ("hub", "served") for part in (*sources, teacher) if part is not None)


@dataclass(frozen=True)
class Call:
    """One use of a stage: what to build, and how it is called in tables (`label`, not part of the key)."""

    run: Run
    stage: Stage
    config: Any
    inputs: Inputs
    label: str

    @cached_property
    def identity(self) -> Any:
        """The config section as the key sees it."""
        return identity(self.config)

    @cached_property
    def key(self) -> str:
        """The artifact's key."""
        digests = {name: ref.digest for name, ref in flatten(self.inputs).items()}
        return key_of(self.stage.name, self.stage.version, self.identity, self.run.seed, digests)

    @property
    def title(self) -> str:
        """`rl easy`"""
        return f"{self.stage.name} {self.label}".strip()

    def load(self) -> ArtifactRef | None:
        """The artifact, when the store has it whole and nobody asked to build it anew."""
        if self.title not in self.run.rebuilt and self.run.rebuild & {self.stage.name, self.title}:
            return None
        return self.run.store.load(self.stage.name, self.key)

    @property
    def folder(self) -> Path:
        """Kept between attempts, removed after the commit."""
        return self.run.state / "work" / self.stage.name / self.key


class Work:
    """A stage at work: where to read, where to write, how to say how far it is."""

    def __init__(self, call: Call, resume: bool = False) -> None:
        self.call = call
        self.seed = call.run.seed
        self.label = call.label
        self.out = call.folder / "out"
        self.scratch = call.folder / "work"
        self.progress = Progress(call.title, get_run_logger())
        self._uploads: Uploads | None = None
        self.versions = {"python": platform.python_version(), "prefect": version_of("prefect")}
        if not resume:
            shutil.rmtree(self.out, ignore_errors=True)
            self.out.mkdir(parents=True)
        self.scratch.mkdir(exist_ok=True)

    def read(self, ref: ArtifactRef, *only: str) -> Path:
        """A local folder with the artifact's files, or with those named, every byte checked against the manifest."""
        return self.call.run.store.localise(ref, self.call.run.state / "cache", *only)

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """How an artifact was made."""
        manifest = self.call.run.store.manifest(ref.stage, ref.key)
        if manifest is None:
            raise StoreError(f"{ref.uri}: the manifest is gone. Run again: it is rebuilt.")
        return manifest

    def run_program(self, module: str, config: Any, inputs: Mapping[str, ArtifactRef]) -> Metrics:
        """Run a stage program in the worker environment on this stage's folders; returns its metrics."""
        resources = self.call.run.resources
        job = Job(
            stage=self.call.title,
            config=config.model_dump(mode="json"),
            seed=self.seed,
            inputs={name: self.read(ref) for name, ref in inputs.items()},
            out=self.out,
            work=self.scratch,
            threads=resources.threads,
            tracking=resources.tracking,
        )
        job_file = self.call.folder / "job.json"
        job_file.write_text(job.model_dump_json(indent=1), encoding="utf-8")
        log = self.call.folder / "log.txt"
        launch = getattr(config, "launch", LaunchConfig())
        program = [PROJECT / resources.worker_python, "-m", module, job_file]
        try:
            with self.call.run.slots, self._uploading():
                metrics = supervise(
                    self.call.title,
                    command(program, launch, resources.threads, self.call.folder / "ranks"),
                    log=log,
                    on_event=self._on_event,
                    on_text=self.progress.text,
                    hang_seconds=60 * resources.hang_minutes,
                    environment={**program_environment(resources.threads, self.call.run.offline), **environment(launch)},
                    folder=PROJECT,
                )
        finally:
            self.progress.flush()
        shutil.copyfile(log, self.out / "log.txt")
        return metrics

    @contextmanager
    def _uploading(self) -> Iterator[None]:
        """Checkpoints go into the store while the block runs, and it begins with the newest one from there."""
        uploads = uploads_of(self.call, self.progress.note)
        if uploads is None:
            yield
            return
        uploads.fetch(self.scratch, self.call.run.state / "cache")
        with uploads:
            self._uploads = uploads
            yield

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            self.progress.report(event["step"], event["of"], event.get("metrics"))
        elif event["event"] == "note":
            self.progress.note(event["text"])
        elif event["event"] == "checkpoint" and self._uploads:
            self._uploads.offer(self.scratch, event["step"])
        elif event["event"] == "done":
            self.versions |= event.get("versions", {})


def uploads_of(call: Call, note: Callable[[str], None]) -> Uploads | None:
    """The uploaded checkpoints of a training stage; None where none are wanted."""
    rule = getattr(call.config, "checkpoints", None)
    if rule is None or not wanted(rule, call.run.store):
        return None
    return Uploads(call.run.store, call.stage.name, call.key, rule, note)


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline: call it in a flow, or submit it to run beside others."""

    name: str
    version: int
    build: Callable[..., Metrics]
    show: Show | None
    gpu: bool | Callable[[Any], bool]

    def call(self, run: Run, config: Any, label: str = "", **inputs: ArtifactRef | Mapping[str, ArtifactRef]) -> Call:
        """One use of the stage, not run yet."""
        return Call(run, self, config, inputs, label)

    def __call__(self, run: Run, config: Any, label: str = "", **inputs: ArtifactRef | Mapping[str, ArtifactRef]) -> ArtifactRef:
        """The artifact: from the store, or built now."""
        call = self.call(run, config, label, **inputs)
        return self._task(call)(call, inputs, return_state=True).result()

    def submit(
        self, run: Run, config: Any, label: str = "", **inputs: ArtifactRef | Mapping[str, ArtifactRef]
    ) -> PrefectFuture[ArtifactRef]:
        """The same in a thread of the flow's task runner."""
        call = self.call(run, config, label, **inputs)
        return self._task(call).submit(call, inputs)

    def _tags(self, config: Any) -> list[str]:
        needed = self.gpu(config) if callable(self.gpu) else self.gpu
        return [f"stage:{self.name}", *([GPU] if needed else [])]

    @cached_property
    def show_code(self) -> str:
        """Changes when the code behind `show` does, so that kept pages are made anew."""
        files = {inspect.getsourcefile(function) for function in (self.show, collecting) if function}
        return hashlib.sha256(b"".join(Path(file).read_bytes() for file in sorted(filter(None, files)))).hexdigest()[:8]

    def _task(self, call: Call) -> Any:
        policy = CacheKeyFnPolicy(cache_key_fn=_record_key).configure(
            isolation_level=IsolationLevel.SERIALIZABLE, lock_manager=FlockManager(call.run.state / "locks")
        )
        return task(
            _build,
            name=self.name,
            task_run_name=call.title,
            description=self.build.__doc__,
            tags=[] if call.load() else self._tags(call.config),  # tags may have limits, and asking for a slot takes two seconds
            cache_policy=policy,
            refresh_cache=True,  # take the lock, never believe the record: the body asks the store
            persist_result=True,
            result_serializer="json",
        )


def stage(
    name: str, version: int, show: Show | None = None, gpu: bool | Callable[[Any], bool] = False
) -> Callable[[Callable[..., Metrics]], Stage]:
    """Make a function `(work, config, **inputs) -> Metrics` a stage. Raise `version` by hand when its outcome changes for the same
    config; `show(title, ref, folder)` presents the artifact to a person, freshly built or not; a stage with `gpu` (or for
    whose config it is true) needs a model and waits for its turn where the tag `gpu` has a limit."""
    return lambda build: Stage(name, version, build, show, gpu)


def _record_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    call: Call = parameters["call"]
    return f"{call.stage.name}-{call.key}"


def _build(call: Call, inputs: Inputs) -> ArtifactRef | State[ArtifactRef]:
    """The body of every stage's task; runs with the lock of the key held. `inputs` is what the UI draws the graph from."""
    if found := call.load():
        say(f"  {call.title:<26} cached")
        get_run_logger().info("cached: %s", found.uri)
        _present(call, found)
        return Completed(name="Cached", message=found.uri, data=found)
    start = time.monotonic()
    say(f"  {call.title:<26} starts")
    built, out = _filled(call, inputs)
    ref = call.run.store.commit(
        call.stage.name,
        call.key,
        out,
        config=call.identity,
        inputs=flatten(inputs),
        versions=built.versions,
        seconds=built.seconds,
        metrics=built.metrics,
        on_progress=lambda text: say(f"  {call.title:<26} {text}"),
    )
    if uploads := uploads_of(call, say):
        uploads.tidy()
    call.run.rebuilt.add(call.title)
    _present(call, ref, out)
    shutil.rmtree(call.folder)
    say(f"  {call.title:<26} done in {time.monotonic() - start:.0f} s")
    return ref


class Built(BaseModel):
    """What is known of a filled folder that waits to be committed."""

    versions: dict[str, str]
    seconds: float
    metrics: dict[str, float]


def _filled(call: Call, inputs: Inputs) -> tuple[Built, Path]:
    """The artifact's folder, filled now, or by an earlier attempt that could not commit it (a full disk, an outage)."""
    note = call.folder / "built.json"
    if note.exists():
        work = Work(call, resume=True)
        work.progress.note("is built already and only has to be stored")
        return Built.model_validate_json(note.read_text(encoding="utf-8")), work.out
    start = time.monotonic()
    work = Work(call)
    metrics = call.stage.build(work, call.config, **inputs)
    versions = {**work.versions, "stage": str(call.stage.version)}
    built = Built(versions=versions, seconds=time.monotonic() - start, metrics=dict(metrics))
    write_durably(note, built.model_dump_json())
    return built, work.out


def _present(call: Call, ref: ArtifactRef, folder: Path | None = None) -> None:
    """Show the artifact in this run. What was shown once is kept, so that a cached stage needs to read no file of its artifact."""
    call.run.titles[ref.uri] = call.title
    if call.stage.show is None:
        return
    name = f"{ref.stage}-{ref.key}-{ref.digest[:12]}-{slug(call.title)}-{call.stage.show_code}.json"
    pages = kept(call.run.state / "shown" / name)
    if pages is None:
        with collecting() as pages:
            call.stage.show(call.title, ref, folder or _small_files(call, ref))
        keep(call.run.state / "shown" / name, pages)
    post([with_inputs(page, flatten(call.inputs), call.run.titles) for page in pages])


def _small_files(call: Call, ref: ArtifactRef) -> Path:
    """A local folder with what a person looks at: everything but weights."""
    store = call.run.store
    manifest = store.manifest(ref.stage, ref.key)
    names = [name for name in manifest.files if not name.startswith("checkpoint/")] if manifest else []
    return store.localise(ref, call.run.state / "cache", *names)
