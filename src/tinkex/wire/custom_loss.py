"""Custom losses: a user's loss function, traced into a graph. Servers must not trust the graph."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from pydantic import Field

from tinkex.wire.base import LenientModel, StrictModel

__all__ = [
    "CreateCustomLossRequest",
    "CreateCustomLossResponse",
    "CustomLossGraph",
    "CustomLossInput",
    "CustomLossInputRank",
    "CustomLossNode",
    "CustomLossNodeOp",
]

#: Limits that the client checks when it traces a loss and the engine checks again.
MAX_INPUTS: Final = 16
INPUT_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,63}")
METRIC_NAME: Final = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

CustomLossInputRank = Literal[0, 1, 2]

CustomLossNodeOp = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]


class CustomLossInput(StrictModel):
    """An input tensor of the loss; the first input is `logprobs`."""

    name: str
    #: Number of dimensions.
    rank: CustomLossInputRank


class CustomLossNode(StrictModel):
    """One operation. Arguments other than plain values are objects with one key, such as `ref`."""

    op: CustomLossNodeOp
    name: str
    #: What is called: `operator.mul`, `torch.exp`, or the name of a method or parameter.
    target: str
    args: list[Any] = Field(default=[])
    kwargs: dict[str, Any] = Field(default={})


class CustomLossGraph(StrictModel):
    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(StrictModel):
    session_id: str
    #: Number of this loss in its session, from 0.
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(LenientModel):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
