"""The tests of a worker whose requests have images, over two ranks."""

import inspect
from collections.abc import Iterator

import pytest

from engine import test_worker_images
from numerics.pictures import write_image_model
from ranks.ranked import expect_tests, ranked
from tinkex.engine import Engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_image_model(tmp_path_factory.mktemp("worker") / "m", "Qwen3VL")
    with ranked(folder, kv_tokens=1024) as engine:
        assert engine.images is not None
        engine.images.close()
        yield engine


for name, value in vars(test_worker_images).items():
    if not name.startswith("test_"):
        globals().setdefault(name, value)  # fixtures
    elif {"rounds", "engine"} & set(inspect.signature(value).parameters):
        globals()[name] = value

expect_tests(globals(), 9)
