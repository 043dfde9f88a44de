"""
What all wire types have in common.

Three bases. `StrictModel` for what is sent (a misspelt keyword is an error that names the nearest
field), `LenientModel` for what is received (a newer server may say more), and `Payload` for the
few types that carry tokens and tensors: slotted, backed by NumPy, and still usable where a pydantic
model would be.
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
    """An ISO 8601 text as a time that UTC has too; anything else as it is."""
    if not isinstance(value, str):
        return value
    moment = datetime.fromisoformat(value)
    if moment.tzinfo is not None:
        try:
            moment.astimezone(UTC)
        except OverflowError:
            raise ValueError(f"{value[:60]!r} is outside of the years 1 to 9999 in UTC.") from None
    return moment


#: A time in a request. JSON has it as text, and requests are read strictly: a text is no time.
RequestTime = Annotated[datetime, BeforeValidator(time_from_text)]


class _Model(BaseModel):
    # Fields such as `model_id` and `model_path` are names of the protocol, not pydantic's.
    # JSON has no NaN and no infinity, and pydantic would write null for them, which the reader takes
    # as "not given". `constants` lets `encode_json` see and refuse them.
    model_config = ConfigDict(
        frozen=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",
    )

    def __str__(self) -> str:
        return repr(self)


class LenientModel(_Model):
    """
    An answer: immutable; fields this version does not know are ignored.

    A float may be NaN: what it reports has happened, whatever the number.
    """

    model_config = ConfigDict(extra="ignore")


class StrictModel(_Model):
    """
    A request: immutable; an unknown keyword is an error that names the nearest field.

    Every float is finite.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _name_the_nearest_field(cls, value: Any) -> Any:
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
        """Every key this type reads: its fields, and their other spellings."""
        names = cls.__dict__.get("_wire_names")
        if names is None:
            names = frozenset(_spellings(cls))
            cls._wire_names = names
        return names

    _wire_names: ClassVar[frozenset[str]]


def _spellings(model: type[BaseModel]) -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield name
        alias = field.validation_alias
        if isinstance(alias, str):
            yield alias
        yield from (choice for choice in getattr(alias, "choices", ()) if isinstance(choice, str))


def unknown_field(name: str, known: Iterable[str]) -> str:
    """What to tell somebody who wrote `name` where only `known` exist."""
    known, name = sorted(known), name[:200]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"unknown field `{name}`; did you mean `{near[0]}`?"
    return f"unknown field `{name}`; the fields are {', '.join(known)}."


class _NamesTheNearestField(type):
    """Gives the slotted types the same message for a misspelt keyword as the strict models."""

    if not TYPE_CHECKING:  # pyright believes a metaclass, and would not look at `__init__`

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                # Looked at only once the call has failed, so that a sound one pays nothing.
                known = list(inspect.signature(cls.__init__).parameters)[1:]
                for name in kwargs:
                    if name not in known:
                        raise TypeError(f"{cls.__name__}: {unknown_field(name, known)}") from None
                raise


class Payload(metaclass=_NamesTheNearestField):
    """
    A frozen, slotted dataclass that can stand where a pydantic model can.

    Subclasses say how they read a plain dict (`_read`) and may say how they dump a field.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        # What `dataclass` writes here fails with a TypeError about `super` for a name that is no
        # field, because `slots=True` makes the class anew.
        if "__setattr__" in cls.__dict__:
            cls.__setattr__ = _refuse_to_set  # type: ignore[method-assign, assignment]
            cls.__delattr__ = _refuse_to_set  # type: ignore[method-assign, assignment]

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        """Build from plain JSON data; what does not fit is a `WireError` with its path."""
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: item for name, item in value.items() if name in names})

    def _dump(self) -> dict[str, Any]:
        """Public fields by name, in order, nested messages still as objects."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if not field.name.startswith("_")
        }

    # -- the part of pydantic's interface that programs use ------------------------------------

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> Self:
        """`obj` itself when it already is one, else one built from a mapping."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise WireError.at((), f"an object is needed here, not {json_kind(obj)}.", "dict_type")
        return cls._read(obj)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **_: Any) -> Self:
        return cls.model_validate(from_json(json_data))

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Plain dicts, lists and numbers, all the way down."""
        return {
            name: _plain(value, exclude_none)
            for name, value in self._dump().items()
            if not (exclude_none and value is None)
        }

    def model_dump_json(self, *, indent: int | None = None, exclude_none: bool = False) -> str:
        dumped = self.model_dump(exclude_none=exclude_none)
        return to_json(dumped, indent=indent, inf_nan_mode="constants").decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A new object with some fields replaced; the values are checked as in a constructor."""
        # Nothing inside can change, so a shallow copy is as good as a deep one.
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
        """What two equal objects agree on."""
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
    A payload that is a pydantic model in the official client: the rest of the interface.

    `isinstance(x, pydantic.BaseModel)` stays False: pydantic allows no virtual subclasses, and a
    real one would cost its construction for every prompt.
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
        """The schema of the model with these fields; `options` are pydantic's."""
        fields: dict[str, Any] = {
            name: (field.annotation, field) for name, field in cls.model_fields.items()
        }
        config = ConfigDict(extra="forbid")
        twin: type[BaseModel] = create_model(cls.__name__, __config__=config, **fields)
        return twin.model_json_schema(**options)

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Self:
        return cls(**values)

    def dict(self, **options: Any) -> dict[str, Any]:
        return self.model_dump(**options)

    def json(self, **options: Any) -> str:
        return self.model_dump_json(**options)

    def copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        return self.model_copy(update=update, deep=deep)


def _refuse_to_set(self: Payload, name: str, value: object = None) -> None:
    raise dataclasses.FrozenInstanceError(
        f"{type(self).__name__} cannot be changed; model_copy(update={{{name!r}: ...}}) makes another."
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
    """A JSON word for what was found."""
    words = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "null" if value is None else words.get(type(value), type(value).__name__)
