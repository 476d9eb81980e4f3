"""The profile file: what a machine's operations cost, for the models measured on it, and where each number is from.

A decoder layer over a row of packed documents of s_1, s_2, ... tokens takes, per direction and tensor-parallel degree,

    fixed_s + token_s * sum(s_i) + token_sq_s * sum(s_i^2)        (attention is the part that grows with the square)

with the tensor-parallel collectives of the measured machine included; so do embedding and head, without the squares.
Where activations are recomputed, the backward pass takes longer: by the layer's forward pass (full), or by the part of
it that `selective` tells, all but the collectives and the products behind attention and the MLP.
"""

import hashlib
import json
import os
from importlib import resources
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from plans.cluster import Link
from plans.errors import InputError
from plans.memory import MemoryRule
from plans.model import ModelSpec, Precision, Recompute
from plans.record import Degree, Record, Version1
from plans.strict_yaml import parse_record, read_record

Label = Literal["measured", "estimated"]
Part = Literal["layer", "embedding", "head"]

_SHIPPED = resources.files("costmodel") / "profiles"
_CONSTANTS = ("layer", "embedding", "head", "memory", "optimizer", "copy")


class Coefficients(Record):
    """Seconds of one pass over one row. They add and scale like the passes themselves."""

    fixed_s: float = Field(ge=0)  # per row
    token_s: float = Field(ge=0)  # per token of the row
    token_sq_s: float = Field(ge=0)  # per squared token of a document; 0 outside the layers

    def seconds(self, tokens: float, squares: float) -> float:
        """Of a row with this sum of document lengths and of their squares."""
        return self.fixed_s + self.token_s * tokens + self.token_sq_s * squares

    def __add__(self, other: Self) -> "Coefficients":
        return Coefficients(
            fixed_s=self.fixed_s + other.fixed_s,
            token_s=self.token_s + other.token_s,
            token_sq_s=self.token_sq_s + other.token_sq_s,
        )

    def __mul__(self, times: float) -> "Coefficients":
        return Coefficients(
            fixed_s=self.fixed_s * times, token_s=self.token_s * times, token_sq_s=self.token_sq_s * times
        )

    def shared_by(self, num_ranks: int) -> "Coefficients":
        """Of a rank that has one of so many equal shares of the row's tokens and of the attention over them."""
        return Coefficients(
            fixed_s=self.fixed_s, token_s=self.token_s / num_ranks, token_sq_s=self.token_sq_s / num_ranks
        )


NOTHING = Coefficients(fixed_s=0.0, token_s=0.0, token_sq_s=0.0)


class Passes(Record):
    """The two directions of one part of the model."""

    forward: Coefficients
    backward: Coefficients

    @property
    def both(self) -> Coefficients:
        return self.forward + self.backward

    def __add__(self, other: Self) -> "Passes":
        return Passes(forward=self.forward + other.forward, backward=self.backward + other.backward)

    def __mul__(self, times: float) -> "Passes":
        return Passes(forward=self.forward * times, backward=self.backward * times)

    def shared_by(self, num_ranks: int) -> "Passes":
        return Passes(forward=self.forward.shared_by(num_ranks), backward=self.backward.shared_by(num_ranks))


class Shape(Record):
    """The model that coefficients hold for."""

    num_layers: int | None = Field(default=None, ge=1)  # None: of any depth
    hidden_size: int = Field(ge=1)
    ffn_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int | None = Field(default=None, ge=2)  # None: hidden_size / num_heads
    vocab_size: int = Field(ge=2)

    @classmethod
    def of(cls, model: ModelSpec, *, any_depth: bool = False) -> Self:
        dims = {name: getattr(model, name) for name in cls.model_fields}
        return cls(**(dims | {"num_layers": None} if any_depth else dims))

    @property
    def head_size(self) -> int:
        """Of a query, key or value of one head."""
        return self.head_dim or self.hidden_size // self.num_heads

    def differences(self, model: ModelSpec) -> list[str]:
        """`dim have!=want` for every dim in which the model is another one."""
        have = self.model_dump(exclude_none=True) | {"head_dim": self.head_size}
        return [f"{name} {n}, not {getattr(model, name)}" for name, n in have.items() if n != getattr(model, name)]


class Residual(Record):
    """How well one series of measured times is met by the fitted coefficients."""

    part: Part
    tp: int = Field(ge=1)
    series: str = Field(min_length=1)  # a direction, or the published series of a pipeline degree
    points: int = Field(ge=1)  # times compared
    used: bool = True  # False: set aside from the fit as doubtful, compared all the same
    rms: float = Field(ge=0)  # root mean square of predicted / measured - 1
    worst: float = Field(ge=0)  # largest |predicted / measured - 1|


class ModelProfile(Record):
    """Times and memory of one model in one number format. Every dict is by tensor-parallel degree."""

    name: str = Field(min_length=1)
    shape: Shape
    precision: Precision
    layer: dict[Degree, Passes] = Field(min_length=1)  # of one decoder layer
    embedding: dict[Degree, Passes]
    head: dict[Degree, Passes]  # final norm, head and loss
    selective: dict[Degree, Coefficients] = Field(default_factory=dict)  # what it repeats of a layer; {}: unknown
    memory: MemoryRule
    residuals: tuple[Residual, ...] = ()

    @field_validator("layer", "embedding", "head")
    @classmethod
    def _in_order(cls, by_tp: dict[int, Passes]) -> dict[int, Passes]:
        return dict(sorted(by_tp.items()))

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name, found in (
            ("embedding", self.embedding),
            ("head", self.head),
            ("activation_bytes", self.memory.activation_bytes.get("none", {})),
        ):
            if missing := sorted(set(self.layer) - set(found)):
                raise InputError(f"{self.name}: layer has times for tp {missing}, {name} has nothing for them")
        return self

    def repeated(self, tp: int, recompute: Recompute) -> Coefficients:
        """What the backward pass of a layer computes again of its forward pass.

        Raises:
            InputError: there are no times for this recompute.
        """
        if recompute == "full":
            return self.layer[tp].forward
        if recompute == "selective":
            if tp not in self.selective:
                known = sorted(self.selective)
                raise InputError(f"the profile of {self.name} has no times of selective recompute for tp {tp}; {known}")
            return self.selective[tp]
        return NOTHING

    def require_tp(self, tp: int) -> None:
        """Raises InputError: there are no times for this degree."""
        if tp not in self.layer:
            raise InputError(f"the profile of {self.name} has no times for tp {tp}; it has {sorted(self.layer)}")


class Provenance(Record):
    """Where the numbers are from."""

    machine: str = Field(min_length=1)  # the host or cluster, in words
    device: str = Field(min_length=1)  # "cpu" or the accelerator's name
    source: str = Field(min_length=1)  # how they were measured, or the publication with its version
    date: str | None = Field(
        default=None, pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
    )  # of the measurement, where it is known
    ranks_per_node: int = Field(ge=1)  # where the tensor-parallel times were taken
    threads_per_rank: int | None = Field(default=None, ge=1)
    constants: dict[
        str, str
    ]  # for every group of constants, how it was found; "estimated: ..." where it was not measured

    @field_validator("constants")
    @classmethod
    def _all_named(cls, constants: dict[str, str]) -> dict[str, str]:
        if missing := [name for name in _CONSTANTS if not constants.get(name)]:
            raise InputError(f"no provenance for {', '.join(missing)}; say how each was found")
        return constants


class OptimizerTime(Record):
    """Clipping and one AdamW step on one rank."""

    fixed_s: float = Field(ge=0)
    element_s: float = Field(ge=0)  # per element that the rank holds at home


class Links(Record):
    """Measured links; they take precedence over the cluster's."""

    intra: Link | None = None  # of one rank, inside its node
    inter: Link | None = None  # of one node, shared by its ranks
    shared: Link | None = None  # of one rank, by copies out of the storage of others on its node; None: it sends


class Profile(Record):
    """A machine's costs."""

    hotspa_profile: Version1
    name: str = Field(min_length=1)
    label: Label  # measured: the layer times are; estimated: they are derived from other figures
    provenance: Provenance
    copy_bytes_per_s: float = Field(gt=0)  # of one rank, within its own memory
    optimizer: OptimizerTime
    links: Links = Links()
    models: tuple[ModelProfile, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _each_model_once(self) -> Self:
        seen = [(m.shape, m.precision) for m in self.models]
        if len(set(seen)) < len(seen):
            raise InputError("two models have the same shape and precision")
        return self

    @property
    def digest(self) -> str:
        """Of the content; layout, comments and the order of keys in the file do not count."""
        content = self.model_dump(mode="json")
        if self.links.shared is None:
            del content["links"]["shared"]  # which profiles had not at first: theirs stay the same
        text = json.dumps(content, sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    @property
    def origin(self) -> str:
        """One line on how far its figures can be trusted."""
        return f"profile {self.name}: {self.label}, from {self.provenance.source}"

    def of_model(self, model: ModelSpec, precision: Precision) -> ModelProfile:
        """The times of a model.

        Raises:
            InputError: it was not profiled; names the models that were, and in what the nearest one differs.
        """
        for found in self.models:
            if found.precision == precision and not found.shape.differences(model):
                return found
        near = min(self.models, key=lambda m: (len(m.shape.differences(model)), m.precision != precision))
        why = near.shape.differences(model) or [f"precision {near.precision}, not {precision}"]
        known = ", ".join(f"{m.name} ({m.precision})" for m in self.models)
        raise InputError(
            f"profile {self.name} has no times for {model.name} in {precision}; it has {known}; "
            f"the nearest, {near.name}, has {', '.join(why)}"
        )


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in _SHIPPED.iterdir() if entry.name.endswith(".yaml"))
    )


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by its name, or a file.

    Raises:
        InputError: no such profile or file, or one that cannot be used; names the file, the line and the key.
    """
    name = str(name_or_path)
    if name in shipped_profiles():
        return parse_record((_SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"), Profile, f"{name}.yaml")
    if not os.path.exists(name):  # False, too, for a name that no file can have
        raise InputError(f"{name}: no such file, and no shipped profile; shipped: {', '.join(shipped_profiles())}")
    return read_record(name, Profile)
