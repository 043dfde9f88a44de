"""`in_list`: a list of any length is one parameter of one statement."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tinkex.server.store.sql_dialects import in_list, list_parameter

IDS = ["plain", 'a "quoted" one', "back\\slash", "ümlaut", "line\nbreak", "[]", ""]
TABLE = sa.Table("listed", sa.MetaData(), sa.Column("id", sa.Text, primary_key=True))


@pytest.fixture(params=["sqlite", "postgresql"])
def connection(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Connection]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/ids.db"
    else:
        url = request.getfixturevalue("postgres").database()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        TABLE.create(connection)
        connection.execute(TABLE.insert(), [{"id": text} for text in IDS])
        yield connection
    engine.dispose()


def chosen(connection: sa.Connection, texts: list[str]) -> set[str]:
    return set(connection.scalars(sa.select(TABLE.c.id).where(in_list(TABLE.c.id, texts))))


def test_listed_rows_are_found_whatever_their_text(connection: sa.Connection) -> None:
    assert chosen(connection, IDS) == set(IDS)
    assert chosen(connection, [*IDS[1:3], "unknown"]) == set(IDS[1:3])
    assert chosen(connection, []) == set()


def test_no_list_is_too_long(connection: sa.Connection) -> None:
    assert chosen(connection, [*(f"id-{number}" for number in range(70_000)), "plain"]) == {"plain"}


def test_in_list_works_in_delete_and_update(connection: sa.Connection) -> None:
    connection.execute(TABLE.delete().where(in_list(TABLE.c.id, IDS[1:])))
    connection.execute(TABLE.update().where(in_list(TABLE.c.id, IDS)).values(id="other"))
    assert list(connection.scalars(sa.select(TABLE.c.id))) == ["other"]


def test_the_list_can_be_a_parameter(connection: sa.Connection) -> None:
    statement = sa.select(TABLE.c.id).where(in_list(TABLE.c.id, sa.bindparam("ids", type_=sa.Text)))
    assert list(connection.scalars(statement, {"ids": list_parameter(["plain", "x"])})) == ["plain"]


def test_every_length_is_the_same_statement(connection: sa.Connection) -> None:
    sent = []
    sa.event.listen(
        connection, "before_cursor_execute", lambda *given: sent.append(given[2]), named=False
    )
    for length in range(5):
        chosen(connection, IDS[:length])
    assert len(sent) == 5
    assert len(set(sent)) == 1
