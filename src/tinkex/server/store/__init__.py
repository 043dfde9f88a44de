"""Rows and files: the only room that speaks SQL. Knows nothing of HTTP or of engines."""

from tinkex.server.store.checkpoint_lists import Saved
from tinkex.server.store.checkpoints import Checkpoints, Version
from tinkex.server.store.database import DatabaseRefused, accepted_work
from tinkex.server.store.keys import ApiKey, Keys
from tinkex.server.store.quotas import OverQuota, Quota
from tinkex.server.store.request_writes import Accepted, Completion, NewRequest
from tinkex.server.store.requests import RequestRow, Requests
from tinkex.server.store.runs import CustomLoss, Model, Runs, RunTaken, Sampler, Session
from tinkex.server.store.schema import Status
from tinkex.server.store.storage_health import Damaged, StorageTrouble
from tinkex.server.store.store import Store, open_store

__all__ = [
    "Accepted",
    "ApiKey",
    "Checkpoints",
    "Completion",
    "CustomLoss",
    "Damaged",
    "DatabaseRefused",
    "Keys",
    "Model",
    "NewRequest",
    "OverQuota",
    "Quota",
    "RequestRow",
    "Requests",
    "RunTaken",
    "Runs",
    "Sampler",
    "Saved",
    "Session",
    "Status",
    "StorageTrouble",
    "Store",
    "Version",
    "accepted_work",
    "open_store",
]
