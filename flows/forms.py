"""The forms of the deployments: what a person fills in before a run starts, made from the config's own schema.

`partial(SftConfig)` is a model with the fields of SftConfig, each optional, with a title, its description and its default named;
what is left out stays as the recipe says. Prefect checks a form when a run is created and refuses it with the field's name;
`config_of` applies what was filled in to the recipe and checks the whole, before anything runs.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, create_model, model_serializer
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema

from parallel_r1.config import (
    AnalysisConfig,
    ConfigError,
    EvaluateConfig,
    FilterConfig,
    GenerateConfig,
    HubStudent,
    PipelineConfig,
    PrepareConfig,
    ReportConfig,
    RlConfig,
    ScratchStudent,
    Section,
    SftConfig,
    load,
    resolved,
)
from tasks.places import PROJECT

RECIPE = "pipeline_config.yaml"
_RECIPES = (path for pattern in ("*.yaml", "*/*.yaml") for path in sorted((PROJECT / "recipes").glob(pattern)))
SHIPPED = (RECIPE, *(path.relative_to(PROJECT).as_posix() for path in _RECIPES))
TINY = tuple(name for name in SHIPPED if name.startswith("recipes/tiny/"))
LATEST = "latest"
STAGES = ("prepare", "base", "generate", "filter", "sft", "rl", "evaluate", "analysis", "report")
AT_THE_TOP = ("name", "seed", "attention", "store", "resources")

OwnFile = Annotated[str, Field(title="another file", pattern=r"\.ya?ml$")]
Shipped = Annotated[Literal[SHIPPED], Field(title="shipped")]  # type: ignore[valid-type]  # what lies in recipes/ at registration
Recipe = Shipped | OwnFile
Overrides = list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+=")]]
StageName = Literal[STAGES]  # type: ignore[valid-type]
Function = TypeVar("Function", bound=Callable[..., Any])


class Form(BaseModel):
    """What may be filled in. Unknown fields are errors; empty ones are left out wherever a form is written down."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_serializer(mode="wrap")
    def _filled_in(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value is not None}


# --- from a config section to a form ----------------------------------------------------------------------------------------


@cache
def partial(section: type[Section]) -> type[Form]:
    """The form of a config section: every field optional, but for the `type` that tells the members of a union apart."""
    fields: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        if name == "type":
            fields[name] = (info.annotation, Field(title="Type", description=f"{info.default}: {_first_sentence(section)}"))
        else:
            fields[name] = _optional(name, info)
    return create_model(f"{section.__name__.removesuffix('Config')}Form", __base__=Form, __doc__=section.__doc__, **fields)


def _first_sentence(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _optional(name: str, info: FieldInfo) -> tuple[Any, FieldInfo]:
    kind = Annotated[(_form_type(info.annotation), *info.metadata)] if info.metadata else _form_type(info.annotation)
    if info.discriminator:
        kind = Annotated[kind, Field(discriminator=info.discriminator)]
    field = Field(
        None,
        title=name.replace("_", " ").capitalize(),
        description=f"{info.description or _described_by_type(info.annotation)}{_default_of(info)}",
        json_schema_extra=lambda schema: schema.pop("default", None),  # an empty field is left out, it is no null
    )
    return kind | SkipJsonSchema[None], field


def _described_by_type(annotation: Any) -> str:
    return _first_sentence(annotation) if inspect.isclass(annotation) and issubclass(annotation, Section) else ""


def _default_of(info: FieldInfo) -> str:
    """` (default 1e-05)`; nothing where the default is a whole section."""
    value = None if info.is_required() else info.get_default(call_default_factory=True)
    if info.is_required() or isinstance(value, Section) or (isinstance(value, dict | list) and _has_sections(value)):
        return ""
    return f" (default {'none' if value is None else json.dumps(value)})"


def _has_sections(value: dict[str, Any] | list[Any]) -> bool:
    return any(isinstance(inner, Section) for inner in (value.values() if isinstance(value, dict) else value))


def _form_type(annotation: Any) -> Any:
    """The same type with forms in the place of sections. null is left to `overrides`, as an empty field means `left out`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        return partial(annotation)
    if origin in (Union, UnionType):
        return Union[tuple(_form_type(member) for member in arguments if member is not NoneType)]  # noqa: UP007  # made of a tuple
    if origin is Annotated:
        return Annotated[(_form_type(arguments[0]), *annotation.__metadata__)]
    if origin in (list, dict):
        return origin[tuple(_form_type(argument) for argument in arguments)]
    return annotation


RunForm = create_model(
    "RunForm", __base__=Form, __doc__="What every stage of the run shares.",
    **{name: _optional(name, PipelineConfig.model_fields[name]) for name in AT_THE_TOP},
)  # fmt: skip
PrepareForm = partial(PrepareConfig)
StudentForm = Annotated[partial(ScratchStudent) | partial(HubStudent), Field(discriminator="type")]
GenerateForm = partial(GenerateConfig)
FilterForm = partial(FilterConfig)
SftForm = partial(SftConfig)
RlForm = partial(RlConfig)
EvaluateForm = partial(EvaluateConfig)
AnalysisForm = partial(AnalysisConfig)
ReportForm = partial(ReportConfig)


def _from(*stages: str) -> Any:
    pattern = rf"^({LATEST}|({'|'.join(stages)})/[0-9a-f]{{6,32}})$"
    allowed = " or ".join(f"{stage}/KEY" for stage in stages)
    return Field(LATEST, pattern=pattern, description=f"{LATEST}: what the recipe leads to, made now where it is missing; or {allowed}, "
                 "as the page of an artifact and `make artifacts` name it; a unique beginning of the key is enough")  # fmt: skip


class FromTrajectories(Form):
    """What `filter` starts from."""

    generate: str = _from("generate")


class FromBase(Form):
    """What `sft` starts from."""

    base: str = _from("base")
    filter: str = _from("filter")


class FromCheckpoint(Form):
    """What `rl` and `evaluate` start from."""

    checkpoint: str = _from("base", "sft", "rl")


# --- the parameters that forms share ------------------------------------------------------------------------------------------

DESCRIPTIONS = {
    "recipe": "config file: one that is shipped, or the path of another, relative to the project",
    "run": "name, seed, attention, store and resources of the run. What is left out stays as the recipe says",
    "section": "fields that differ from the recipe; what is left out stays as it says",
    "overrides": "dotted fields that differ from the recipe, such as sft.max_steps=10 or sft.max_steps=null; they win over the form",
    "force": "build it anew even when the store has it",
    "upstream": "which artifacts to start from",
    "recipes": "the rows of the table: config files, each with a name of its own",
    "ready": "only rows that are finished: the page of a table at which another run is still at work",
    "seeds": "how many seeds, from 0 on; an interval over seeds needs two at least",
    "stages": "how many stages of the curriculum to run; all when left out",
    "place": "here: every stage in this run's process; pools: stages that need a model as runs of their own in the pool `gpu`",
}


def described(function: Function) -> Function:
    """Adds the parameters' descriptions to the docstring, where Prefect's forms take them from."""
    lines = [f"    {name}: {DESCRIPTIONS.get(name, DESCRIPTIONS['section'])}" for name in inspect.signature(function).parameters]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Args:", *lines])
    return function


# --- from a filled-in form to a config ------------------------------------------------------------------------------------------


def config_of(recipe: str, overrides: list[str], sections: Mapping[str, Any]) -> PipelineConfig:
    """The recipe with what was filled in, and then with the dotted overrides.

    Raises ConfigError when the whole can't be used.
    """
    return load(PROJECT / recipe, [*filled_in(recipe, sections), *overrides])


def filled_in(recipe: str, sections: Mapping[str, Any]) -> list[str]:
    """What was filled in, as dotted overrides. `run` stands for fields at the top; a list counts from 0, as in `rl.0.steps`."""
    there = _recipe(PROJECT / recipe)
    found: list[str] = []
    for name, form in sections.items():
        if name == "run":
            found += [line for field, value in _set_fields(form) for line in _dotted(value, field, there.get(field))]
        elif form:
            found += _dotted(form, name, there.get(name))
    return found


def _recipe(path: Path) -> dict[str, Any]:
    """What the file says before the schema's defaults; whatever is wrong with it is said by `load`."""
    try:
        return resolved(path)
    except ConfigError:
        return {}


def _set_fields(form: Form | None) -> Iterator[tuple[str, Any]]:
    if form is not None:
        yield from ((name, value) for name in type(form).model_fields if (value := getattr(form, name)) is not None)


def _dotted(value: Any, at: str, there: Any) -> Iterator[str]:
    """`at.field=value` for everything set below `value`; `there` is what the recipe says at that place."""
    if isinstance(value, Form):
        if getattr(value, "type", None) not in (None, there.get("type") if isinstance(there, dict) else None):
            yield f"{at}={_plain(value)}"  # another member of the union: nothing of the old one stays
            return
        fields = {name: inner for name, inner in _set_fields(value) if name != "type"}
    elif isinstance(value, dict) and any(isinstance(inner, Form) for inner in value.values()):
        fields = value
    elif isinstance(value, list) and any(isinstance(inner, Form) for inner in value):
        if not isinstance(there, list) or len(there) < len(value):
            entries = f"{len(value)} entries in the form, {len(there or [])} in the recipe"
            raise ConfigError(f"{at}: {entries}. Add stages in a recipe of your own")
        fields = {str(index): inner for index, inner in enumerate(value)}
    else:
        if value is not None:
            yield f"{at}={_plain(value)}"
        return
    for name, inner in fields.items():
        below = there[int(name)] if isinstance(there, list) else there.get(name) if isinstance(there, dict) else None
        yield from _dotted(inner, f"{at}.{name}", below)


def _plain(value: Any) -> str:
    """One line of YAML."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1 << 20).removesuffix("\n").removesuffix("\n...")
