"""A web process of a cluster that has never had a worker."""

from pathlib import Path

import pytest

from postgres import Postgres
from server.api.test_custom_losses import loss
from server.cluster_parts import a_web
from server.echo import BASE

pytestmark = pytest.mark.anyio


async def test_a_client_is_told_to_start_a_worker(postgres: Postgres, tmp_path: Path) -> None:
    async with a_web(postgres.database(), tmp_path) as web:
        session = await web.session()
        refused = await web.post(
            "create_model",
            {
                "session_id": session,
                "model_seq_id": 0,
                "base_model": BASE,
                "lora_config": {"rank": 1},
            },
        )
        assert refused.status == 400
        assert "Served: none. To add it, start a worker" in refused.json["detail"]
        refused = await web.post("create_custom_loss", loss(session))
        assert refused.status == 503
        assert "no base model is served yet. Start a worker" in refused.json["detail"]
