"""Rows and files: the only room that speaks SQL. Knows nothing of HTTP or of engines."""

from tinkex.server.store.accepting import Accepted, NewRequest
from tinkex.server.store.catalog import Saved
from tinkex.server.store.checkpoints import Checkpoints, Version
from tinkex.server.store.database import DatabaseRefused, accepted_work
from tinkex.server.store.finishing import Completion
from tinkex.server.store.keys import ApiKey, Keys
from tinkex.server.store.quotas import OverQuota, Quota
from tinkex.server.store.requests import RequestRow, Requests
from tinkex.server.store.runs import CustomLoss, Model, Runs, RunTaken, Sampler, Session
from tinkex.server.store.status import Status
from tinkex.server.store.store import Store, open_store
from tinkex.server.store.trouble import Damaged, StorageTrouble

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
