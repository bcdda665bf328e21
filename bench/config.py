"""Typed configuration: TOML in, pydantic out, unknown keys refused, and a hash of the resolved whole."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from bench.errors import UsageError, did_you_mean
from bench.workload import Selection

__all__ = [
    "Cell",
    "EngineConfig",
    "Experiment",
    "PairConfig",
    "Profile",
    "RunConfig",
    "SelectionConfig",
    "apply_overrides",
    "config_hash",
    "read_toml",
    "validate",
]


M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """Base of every configuration model: unknown keys are errors, values can't change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
"""What becomes part of a file name, and of an HTTP header."""


class EngineConfig(Strict):
    """One engine.

    Attributes:
        kind: A registered engine kind: ``llamacpp``, ``openai`` or ``mock``.
        model: Name in the model store (llamacpp), or the model name sent to the server (openai).
        url: Base URL up to and including ``/v1`` (openai).
        api_key_env: Name of the environment variable with the key; the key itself is never stored.
        threads: CPU threads; None means every core.
        context: Context window per slot, tokens.
        slots: Requests that the server decodes at once; each slot keeps the prefix of its last prompt.
        nice: By how much the engine yields to others on the same cores (llamacpp), 0 to 19.
        drafter: Model of the store that drafts for this one (llamacpp): speculative decoding.
        draft_max: Tokens that the drafter proposes at most before the target checks them.
        timeout_s: Limit for one call, seconds, tries and waits included.
        tries: HTTP requests per call at most (1 = never retry). Every try is recorded.
        params: Fields added to every request body (for example ``chat_template_kwargs``).
        script: Scripted behaviour (mock only); see :mod:`runners.engines.mock`.
    """

    kind: str = "llamacpp"
    model: str | None = None
    url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    threads: int | None = Field(default=None, ge=1)
    context: int = Field(default=8192, ge=256)
    slots: int = Field(default=1, ge=1, le=256)
    nice: int = Field(default=0, ge=0, le=19)
    drafter: str | None = None
    draft_max: int = Field(default=3, ge=1, le=64)
    timeout_s: float = Field(default=300.0, gt=0)
    tries: int = Field(default=1, ge=1, le=10)
    params: dict[str, Any] = Field(default_factory=dict)
    script: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _drafter_is_ours_to_load(self) -> EngineConfig:
        if self.drafter is not None and self.kind != "llamacpp":
            raise ValueError(f"`drafter` is for llamacpp; a server of kind {self.kind} brings its own")
        return self


class PairConfig(Strict):
    """A target engine and, where a method needs one, a small engine.

    Attributes:
        target: The target.
        small: The small engine.
        specdec: The target with speculative decoding, for methods named ``…+specdec``; None makes it of the
            target, with its ``draft_max``, and the small model where both are llamacpp engines.
    """

    target: EngineConfig
    small: EngineConfig | None = None
    specdec: EngineConfig | None = None

    @model_validator(mode="after")
    def _only_specdec_is_drafted(self) -> PairConfig:
        # Else rows that are not named +specdec would be measured with it.
        for role, engine in (("target", self.target), ("small", self.small)):
            if engine is not None and engine.drafter is not None:
                raise ValueError(f"{role}.drafter: set specdec.drafter, and run the method as METHOD+specdec")
        target, twin = self.target, self.specdec
        if twin is not None and {target.kind, twin.kind} == {"llamacpp"} and twin.model != target.model:
            raise ValueError(f"specdec.model: it must be the target's, {target.model!r}")
        return self

    def speculative(self) -> EngineConfig | None:
        """Return the target with speculative decoding; None where the pair has none."""
        twin = self.specdec or self.target
        if twin.kind != "llamacpp":
            return self.specdec
        if twin.drafter is None and self.small is not None and self.small.kind == "llamacpp":
            twin = twin.model_copy(update={"drafter": self.small.model})
        return twin if twin.drafter is not None else None


class SelectionConfig(Strict):
    """As :class:`bench.workload.Selection`; ``source = "path"`` is implied by ``path``."""

    source: Literal["builtin", "path", "hub"] = "builtin"
    path: str | None = None
    split: str = "test"
    n: int | None = Field(default=None, ge=1)
    groups: int | None = Field(default=None, ge=1)
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _path_implies_source(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("path") and "source" not in data:
            return {**data, "source": "path"}
        return data

    @model_validator(mode="after")
    def _path_and_source_agree(self) -> SelectionConfig:
        if (self.source == "path") != (self.path is not None):
            raise ValueError('`path` goes with source = "path", and only with it')
        return self

    def selection(self) -> Selection:
        """Return the plain form that workloads take."""
        return Selection(**self.model_dump())


class Cell(Strict):
    """One (method variant × workload × load pattern × seed).

    Attributes:
        method: Registered name.
        method_config: The method's own settings, defaults filled in when the run is resolved.
        workload: Registered name.
        selection: Which samples.
        first: Only so many of them, from the first on; None means all.
        concurrency: Requests in flight at most (closed loop; the runner here is sequential: 1).
        repeats: Passes over the samples.
        stream: Whether the runner asks the service for a stream (needed for TTFT).
        timeout_s: Limit for one request, seconds.
        label: Name of the cell, where method and workload don't tell it from another one.
    """

    method: str
    method_config: dict[str, Any] = Field(default_factory=dict)
    workload: str
    selection: SelectionConfig = SelectionConfig()
    first: int | None = Field(default=None, ge=1)
    concurrency: Literal[1] = 1
    repeats: int = Field(default=1, ge=1)
    stream: bool = True
    timeout_s: float = Field(default=600.0, gt=0)
    label: FileName | None = None

    @property
    def id(self) -> str:
        """Name of the cell within its run, usable as a file name."""
        return self.label or f"{self.workload}+{self.method}"


class Profile(Strict):
    """Which engines, and how many samples.

    Attributes:
        name: ``laptop``, …
        description: One line for ``reusebench list``.
        pair: The engines.
        sizes: Selection settings per experiment id, laid over the experiment's own; ``twins`` among them is
            the experiment's.
    """

    name: str
    description: str
    pair: PairConfig
    sizes: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Experiment(Strict):
    """The cells and the rendering of one table or figure of a paper.

    Attributes:
        id: Name on the command line.
        title: Heading of the report.
        paper: Which table or figure it stands beside; None for our own experiments.
        about: One paragraph for the report: what is compared and how to read it.
        workloads, methods: Their product is the cells.
        baseline: Method that ratios and paired tests are taken against.
        selection: Sample selection, laid under the profile's sizes.
        twins: How many samples, from the first on, cells with speculative decoding take; None means all.
        paper_values: Path into ``paper_values.json`` per workload (for example ``minicache.formula``).
    """

    id: str
    title: str
    paper: str | None = None
    about: str
    workloads: tuple[str, ...]
    methods: tuple[str, ...]
    baseline: str
    selection: dict[str, Any] = Field(default_factory=dict)
    twins: int | None = Field(default=None, ge=1)
    paper_values: dict[str, str] = Field(default_factory=dict)


class RunConfig(Strict):
    """A whole run, resolved: everything that can change its numbers except the machine.

    Attributes:
        experiment: Id of the experiment, or ``adhoc``.
        profile: Name of the profile that the engines came from.
        pair: The engines.
        cells: In the order in which they run.
        baseline: Method that ratios and paired tests are taken against; None means none.
    """

    experiment: FileName = "adhoc"
    profile: str
    pair: PairConfig
    cells: tuple[Cell, ...] = Field(min_length=1)
    baseline: str | None = None

    @model_validator(mode="after")
    def _cell_ids_differ(self) -> RunConfig:
        ids = [cell.id for cell in self.cells]
        if len(set(ids)) != len(ids):
            twice = sorted({one for one in ids if ids.count(one) > 1})
            raise ValueError(f"two cells are called {twice[0]!r}; give one of them a `label`")
        return self

    @model_validator(mode="after")
    def _baseline_runs(self) -> RunConfig:
        methods = {cell.method for cell in self.cells}
        if self.baseline is not None and self.baseline not in methods:
            hint = did_you_mean(self.baseline, methods)
            raise ValueError(f"the baseline {self.baseline!r} is not among the methods.{hint}")
        return self


def read_toml(path: Path | Traversable) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UsageError: It can't be read or is no TOML; the message says where.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"), parse_float=_finite)
    except OSError as error:
        raise UsageError(f"Can't read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from error


def _finite(text: str) -> float:
    """Read a TOML float; infinity and NaN have no place in a run's JSON, nor a meaning here."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def apply_overrides(data: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return ``data`` with every ``a.b=value`` of ``settings`` applied.

    A value is read as TOML where it is TOML (``3``, ``true``, ``[1, 2]``), as a plain string otherwise.
    A number in a key is an index where the value there is a list.

    Raises:
        UsageError: A setting has no ``=``, or its key leads through a value that is no table.
    """
    result: dict[str, Any] = json.loads(json.dumps(data))
    for setting in settings:
        key, equals, raw = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                f"--set takes KEY=VALUE with a dotted key, such as pair.target.threads=4; got {setting!r}."
            )
        try:
            value: Any = tomllib.loads(f"value = {raw}", parse_float=_finite)["value"]
        except tomllib.TOMLDecodeError:
            value = raw
        except ValueError as error:
            raise UsageError(f"--set {setting}: {error}.") from error
        *parents, last = key.strip().split(".")
        node: Any = result
        for part in parents:
            node = _child(node, part, setting)
        if isinstance(node, list):
            node[_index(node, last, setting)] = value
        elif isinstance(node, dict):
            node[last] = value
        else:
            raise UsageError(f"--set {setting}: {'.'.join(parents)} is a plain value, not a table.")
    return result


def _child(node: Any, part: str, setting: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, setting)]
    if isinstance(node, dict):
        if node.get(part) is None:
            node[part] = {}
        return node[part]
    raise UsageError(f"--set {setting}: {part!r} is inside a plain value, not a table.")


def _index(node: list[Any], part: str, setting: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise UsageError(f"--set {setting}: {part!r} is no index of a list of {len(node)}.")
    return int(part)


def validate(model: type[M], data: Mapping[str, Any], where: str) -> M:
    """Build ``model`` from ``data``.

    Raises:
        UsageError: The first fault, with its dotted place and, for an unknown key, what was meant.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = _fields_at(model, fault["loc"][:-1])
            text = f"unknown key{did_you_mean(str(fault['loc'][-1]), known) or '.'}"
        else:
            text = fault["msg"].removeprefix("Value error, ")
        more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise UsageError(f"{where}: {place + ': ' if place else ''}{text}{more}") from error


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the model that ``loc`` leads to; [] where it leads into no model."""
    current: Any = model
    for part in loc:
        if isinstance(part, int):
            continue
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            return []
        annotation = current.model_fields[part].annotation if part in current.model_fields else None
        current = next((arg for arg in _arguments(annotation) if _is_model(arg)), None)
    return sorted(current.model_fields) if _is_model(current) else []


def _arguments(annotation: Any) -> list[Any]:
    return [annotation, *(inner for arg in get_args(annotation) for inner in _arguments(arg))]


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def config_hash(config: BaseModel) -> str:
    """Return the sha256 of the resolved configuration, 16 hex digits; the same for the same meaning."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
