"""
Write metrics to TensorBoard, Weights & Biases or trackio.

    with TensorBoardWriter("logs/run-1") as writer:
        for step in range(steps):
            ...
            writer.write(step, passed.result().metrics)

A tinkex server stores the metrics of every step by itself. To copy those of a run:

    for point in rest.get_training_run_metrics(run).result().points:
        writer.write(point.step, point.metrics)

Each writer needs a package, which its extra installs, such as `tinkex[tensorboard]`. It is imported
when the writer is created.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, Protocol, Self

from tinkex.extras import needs

__all__ = ["MetricWriter", "TensorBoardWriter", "TrackioWriter", "WandbWriter"]


class MetricWriter(Protocol):
    """Anything that takes the metrics of steps. Steps must not go backwards."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step, by name."""

    def close(self) -> None:
        """Write what is left. Call it once, at the end."""


class _Closing:
    """`with` for writers."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoardWriter(_Closing):
    """Writes event files, which `tensorboard --logdir FOLDER` shows; each run needs its own folder."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        with needs("TensorBoardWriter"):
            from tensorboardX import SummaryWriter
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # A tag has no colon: the package would replace it too, and log that it did.
            self._writer.add_scalar(name.replace(":", "_"), float(value), step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter(_Closing):
    """Starts a run of Weights & Biases. `options` are those of `wandb.init`, such as `mode`."""

    def __init__(self, project: str | None = None, name: str | None = None, **options: Any) -> None:
        with needs("WandbWriter"):
            import wandb
        #: The run itself, for what this class does not offer.
        self.run: Any = wandb.init(project=project, name=name, **options)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class TrackioWriter(_Closing):
    """Starts a run of trackio. `options` are those of `trackio.init`, such as `space_id`."""

    def __init__(self, project: str, name: str | None = None, **options: Any) -> None:
        with needs("TrackioWriter"):
            import trackio
        #: The run itself, for what this class does not offer.
        self.run: Any = trackio.init(project=project, name=name, **options)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()
