"""
Statements as functions of a connection, for `Database.read`, `write` and the rest.

    await database.read(one(Model, sa.select(*columns(Model, models)).where(...)))

Rows become dataclasses, whose fields have the names of the columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import sqlalchemy as sa

T = TypeVar("T")


def columns(kind: type, table: sa.Table) -> tuple[sa.Column[Any], ...]:
    """The columns of a table that a dataclass has, in the order of its fields."""
    return tuple(table.c[field.name] for field in fields(kind))


def values(row: object) -> dict[str, Any]:
    """The fields of a dataclass by name, to insert it."""
    return {field.name: getattr(row, field.name) for field in fields(row)}  # type: ignore[arg-type]


def one(kind: type[T], statement: sa.Executable) -> Callable[[sa.Connection], T | None]:
    """The first row as a dataclass; None if there is none."""

    def operation(connection: sa.Connection) -> T | None:
        row = connection.execute(statement).first()
        return None if row is None else kind(**row._mapping)

    return operation


def every(kind: type[T], statement: sa.Executable) -> Callable[[sa.Connection], list[T]]:
    """All rows as dataclasses."""
    return lambda connection: [kind(**row._mapping) for row in connection.execute(statement)]


def scalar(statement: sa.Executable) -> Callable[[sa.Connection], Any]:
    """The first value; None if there is no row."""
    return lambda connection: connection.scalar(statement)


def scalars(statement: sa.Executable) -> Callable[[sa.Connection], list[Any]]:
    """The first value of each row."""
    return lambda connection: list(connection.scalars(statement))


def exists(statement: sa.Executable) -> Callable[[sa.Connection], bool]:
    """Whether there is a row."""
    return lambda connection: connection.execute(statement).first() is not None


def execute(
    statement: sa.Executable, given: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
) -> Callable[[sa.Connection], sa.CursorResult[Any]]:
    """Executes a change, once for each mapping of values."""
    return lambda connection: connection.execute(statement, given)
