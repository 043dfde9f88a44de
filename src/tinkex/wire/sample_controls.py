"""
A sample request as the server stores it and the engine reads it.

Tinker's protocol has no controls over single logits. OpenAI's has, so its routes make a request with
`controls`. Clients of Tinker's routes cannot send them.
"""

from __future__ import annotations

from pydantic import Field

from tinkex.wire.base import StrictModel
from tinkex.wire.sampling import SampleRequest


class SampleControls(StrictModel):
    """
    What changes the logits of each step of a sample.

    They depend on nothing but the request and the tokens of its own sequence, so that the same seed
    gives the same tokens in any company.
    """

    #: Tokens whose logits change, and what is added to each. Added before the temperature.
    bias_tokens: list[int] = Field(default_factory=list)
    biases: list[float] = Field(default_factory=list)
    #: Subtracted from the logit of a token that the sequence already has (without its prompt).
    presence_penalty: float = 0.0
    #: Subtracted once for each time that the sequence already has the token.
    frequency_penalty: float = 0.0
    #: A grammar of llguidance that the text of the sequence must follow; None: any text.
    grammar: str | None = None


class StoredSampleRequest(SampleRequest):
    """A sample request with controls."""

    controls: SampleControls | None = None
