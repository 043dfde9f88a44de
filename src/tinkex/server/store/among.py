"""`column IN (...)` for lists of any length, as one statement."""

import json
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


def among(
    column: sa.ColumnElement[str], texts: Collection[str] | sa.BindParameter[str]
) -> sa.ColumnElement[bool]:
    """
    Whether the column is one of these, or of what `listed` makes a parameter.

    With a parameter for each, every length would be a statement of its own. Connections keep the
    last hundred they have prepared: megabytes of the same question. And there may be too many.
    """
    given = texts if isinstance(texts, sa.BindParameter) else sa.literal(listed(texts), sa.Text)
    return column.bool_op("IN")(_Rows(given))


def listed(texts: Collection[str]) -> str:
    """For a parameter that `among` was given."""
    return json.dumps(list(texts))


class _Rows(FunctionElement[str]):
    """The texts of a list in JSON, each as a row."""

    type = sa.Text()
    inherit_cache = True


@compiles(_Rows, "sqlite")
def _in_sqlite(element: _Rows, compiler: SQLCompiler, **how: Any) -> str:
    return f"(SELECT value FROM json_each({compiler.process(element.clauses, **how)}))"


@compiles(_Rows, "postgresql")
def _in_postgres(element: _Rows, compiler: SQLCompiler, **how: Any) -> str:
    given = compiler.process(element.clauses, **how)
    return f"(SELECT jsonb_array_elements_text(CAST({given} AS jsonb)))"
