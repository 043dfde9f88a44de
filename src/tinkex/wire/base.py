"""
Base classes of all wire types.

`StrictModel` is for requests: an unknown field is an error that suggests the nearest known one.
`LenientModel` is for responses: fields that a newer server adds are ignored. `Payload` is for the
few types that carry tokens and tensors: slotted and backed by NumPy, with pydantic's interface.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, create_model, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema, from_json, to_json

from tinkex import display
from tinkex.tracebacks import end_at_caller
from tinkex.wire.errors import WireError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler

__all__ = [
    "LenientModel",
    "ModelPayload",
    "Payload",
    "RequestTime",
    "StrictModel",
    "json_kind",
    "time_from_text",
    "unknown_field",
]


def time_from_text(value: Any) -> Any:
    """Parse an ISO 8601 string that UTC can represent; any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    moment = datetime.fromisoformat(value)
    if moment.tzinfo is not None:
        try:
            moment.astimezone(UTC)
        except OverflowError:
            raise ValueError(f"{value[:60]!r} is outside the years 1 to 9999 in UTC.") from None
    return moment


#: A time in a request. Requests are validated strictly, so JSON strings must be parsed first.
RequestTime = Annotated[datetime, BeforeValidator(time_from_text)]


class _Model(BaseModel):
    # The protocol has fields such as `model_id`, which pydantic would reserve (`model_*`).
    # By default pydantic writes NaN and infinity as null, which readers take for an absent field.
    # `constants` writes them as literals, so that `encode_json` can find and reject them.
    model_config = ConfigDict(
        frozen=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",
    )

    def __repr__(self) -> str:
        return display.call(type(self).__name__, self._shown())

    def _shown(self) -> Iterable[tuple[str, Any]]:
        """The fields of the repr, except those that pydantic is told not to show."""
        return ((name or "", value) for name, value in self.__repr_args__())

    def __str__(self) -> str:
        return repr(self)


class LenientModel(_Model):
    """A response: immutable; unknown fields are ignored. Floats may be NaN."""

    model_config = ConfigDict(extra="ignore")

    def _shown(self) -> Iterable[tuple[str, Any]]:
        return ((name, value) for name, value in super()._shown() if value is not None)


class StrictModel(_Model):
    """A request: immutable; an unknown field is an error naming the nearest one. Floats are finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _suggest_nearest_field(cls, value: Any) -> Any:
        if isinstance(value, dict):
            known = cls.wire_names()
            for name in value:
                if name not in known:
                    raise PydanticCustomError(
                        "unknown_field", "{text}", {"text": unknown_field(str(name), known)}
                    )
        return value

    @classmethod
    def wire_names(cls) -> frozenset[str]:
        """All keys this type accepts: field names and their aliases."""
        names = cls.__dict__.get("_wire_names")
        if names is None:
            names = frozenset(_field_names_and_aliases(cls))
            cls._wire_names = names
        return names

    _wire_names: ClassVar[frozenset[str]]


def _field_names_and_aliases(model: type[BaseModel]) -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield name
        alias = field.validation_alias
        if isinstance(alias, str):
            yield alias
        yield from (choice for choice in getattr(alias, "choices", ()) if isinstance(choice, str))


def unknown_field(name: str, known: Iterable[str]) -> str:
    """An error message for the unknown field `name`, with the nearest of `known` if any."""
    known, name = sorted(known), name[:200]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"unknown field `{name}`; did you mean `{near[0]}`?"
    return f"unknown field `{name}`; the fields are {', '.join(known)}."


class _SuggestsNearestField(type):
    """Gives slotted types the same message for an unknown keyword as strict models."""

    if not TYPE_CHECKING:  # pyright would use this signature instead of `__init__`

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except (TypeError, ValueError) as error:
                # Only after the call has failed, so that valid calls cost nothing extra.
                if isinstance(error, TypeError):
                    known = list(inspect.signature(cls.__init__).parameters)[1:]
                    unknown = next((name for name in kwargs if name not in known), None)
                    if unknown is not None:
                        error.args = (f"{cls.__name__}: {unknown_field(unknown, known)}",)
                end_at_caller(error)
                raise


class Payload(metaclass=_SuggestsNearestField):
    """
    A frozen, slotted dataclass with the part of pydantic's model interface that programs use.

    Subclasses implement `_read` (from a plain dict) and may override `_dump` and `_shown`.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        # `slots=True` creates a new class, so the `super()` in the `__setattr__` that `dataclass`
        # generates raises TypeError for names that are not fields.
        if "__setattr__" in cls.__dict__:
            cls.__setattr__ = _reject_assignment  # type: ignore[method-assign, assignment]
            cls.__delattr__ = _reject_assignment  # type: ignore[method-assign, assignment]

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        """Build from plain JSON data; `WireError` with the path of an invalid field."""
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: item for name, item in value.items() if name in names})

    def _dump(self) -> dict[str, Any]:
        """Public fields by name, in order; nested messages stay objects."""
        return dict(self._fields())

    def __repr__(self) -> str:
        return display.call(type(self).__name__, self._shown())

    def _shown(self) -> Iterable[tuple[str, Any]]:
        """The fields of the repr: those with a value."""
        return ((name, value) for name, value in self._fields() if value is not None)

    def _fields(self) -> Iterable[tuple[str, Any]]:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if not field.name.startswith("_"):
                yield field.name, getattr(self, field.name)

    # -- pydantic's interface ------------------------------------------------------------------

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> Self:
        """`obj` itself if it already has this type, else a new object built from a mapping."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise WireError.at((), f"expected an object, not {json_kind(obj)}.", "dict_type")
        return cls._read(obj)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **_: Any) -> Self:
        return cls.model_validate(from_json(json_data))

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Nested plain dicts, lists and numbers."""
        return {
            name: _plain(value, exclude_none)
            for name, value in self._dump().items()
            if not (exclude_none and value is None)
        }

    def model_dump_json(self, *, indent: int | None = None, exclude_none: bool = False) -> str:
        dumped = self.model_dump(exclude_none=exclude_none)
        return to_json(dumped, indent=indent, inf_nan_mode="constants").decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A new object with some fields replaced; values are validated as in the constructor."""
        # The contents are immutable, so a shallow copy is enough even when `deep` is set.
        return type(self)(**{**self._constructor_arguments(), **(update or {})})

    def _constructor_arguments(self) -> dict[str, Any]:
        return self._dump()

    def __copy__(self) -> Self:
        return self.model_copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.model_copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._constructor_arguments())

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return bool(self._key() == other._key())

    def __hash__(self) -> int:
        return hash(repr(self._key()))

    def _key(self) -> Any:
        """The value that equality and hashing compare."""
        return self._dump()

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.model_validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value, info: value.model_dump(exclude_none=info.exclude_none),
                info_arg=True,
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "object", "title": cls.__name__}


class ModelPayload(Payload):
    """
    A payload that is a pydantic model in the official client; adds the rest of that interface.

    `isinstance(x, pydantic.BaseModel)` is still False: pydantic does not allow virtual subclasses,
    and a real subclass would make every prompt slower to construct.
    """

    __slots__ = ()

    model_fields: ClassVar[dict[str, FieldInfo]]

    @property
    def model_fields_set(self) -> set[str]:
        return set(self.model_fields)

    @property
    def model_extra(self) -> None:
        return None

    @classmethod
    def model_json_schema(cls, **options: Any) -> dict[str, Any]:
        """The JSON schema of a pydantic model with the same fields; `options` are pydantic's."""
        fields: dict[str, Any] = {
            name: (field.annotation, field) for name, field in cls.model_fields.items()
        }
        config = ConfigDict(extra="forbid")
        model: type[BaseModel] = create_model(cls.__name__, __config__=config, **fields)
        return model.model_json_schema(**options)

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Self:
        return cls(**values)

    def dict(self, **options: Any) -> dict[str, Any]:
        return self.model_dump(**options)

    def json(self, **options: Any) -> str:
        return self.model_dump_json(**options)

    def copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        return self.model_copy(update=update, deep=deep)


def _reject_assignment(self: Payload, name: str, value: object = None) -> None:
    raise dataclasses.FrozenInstanceError(
        f"{type(self).__name__} is immutable; use model_copy(update={{{name!r}: ...}}) instead."
    )


def _rebuild(cls: type[Payload], arguments: dict[str, Any]) -> Payload:
    return cls(**arguments)


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, (Payload, BaseModel)):
        return value.model_dump(exclude_none=exclude_none)
    if isinstance(value, dict):
        return {key: _plain(item, exclude_none) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
        return [_plain(item, exclude_none) for item in value]
    return value


def json_kind(value: Any) -> str:
    """The JSON name of the type of `value`, for error messages."""
    words = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "null" if value is None else words.get(type(value), type(value).__name__)
