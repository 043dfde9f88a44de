"""Code that waits for the device is found where it runs, with and without inference mode."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tinkex.engine.model.device_waits import NothingWaits, WaitsForDevice

CPU = torch.device("cpu")

WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "a number": lambda x: int(x[1]),
    "a condition": lambda x: bool((x > 1).any()),
    "a mask": lambda x: x[x > 1],
    "places": torch.nonzero,
    "repeats": lambda x: torch.repeat_interleave(x, x),
    "values": torch.unique,
    "counts": torch.bincount,
    "a number in an operation of several": F.one_hot,
    "constants": lambda x: x + torch.tensor([1, 2, 3]),
    "a copy": lambda x: x.to("meta"),
}
FREE: dict[str, Callable[[torch.Tensor], object]] = {
    "a choice": lambda x: torch.where(x > 1, x, 0),
    "a fill": lambda x: x.masked_fill(x > 1, 0),
    "indices": lambda x: x[x],
    "a format": lambda x: x.float() * 0.5,
    "the largest": lambda x: x.topk(2).indices,
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_named(name: str, inference: bool) -> None:
    x = torch.arange(3)
    with (
        torch.inference_mode(inference),
        NothingWaits(CPU),
        pytest.raises(WaitsForDevice, match=r"waits|copies|copied"),
    ):
        WAITS[name](x)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", FREE)
def test_what_does_not_wait_runs(name: str, inference: bool) -> None:
    x = torch.arange(3)
    with torch.inference_mode(inference), NothingWaits(CPU):
        FREE[name](x)


@pytest.mark.parametrize("inference", [True, False])
def test_an_index_of_the_host_waits(inference: bool) -> None:
    device = torch.device("meta")
    x, index = torch.zeros(5, 3, device=device), torch.arange(2)
    with torch.inference_mode(inference), NothingWaits(device):
        x[torch.arange(2, device=device)]
        with pytest.raises(WaitsForDevice, match="index"):
            x[index]
        with pytest.raises(WaitsForDevice, match="index_put"):
            x[index] = 1.0
