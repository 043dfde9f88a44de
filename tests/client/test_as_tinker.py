"""`tinkex.as_tinker`: programs that import `tinker` run on tinkex. One process per test."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def python(code: str, cwd: Path) -> str:
    done = run("-c", textwrap.dedent(code), cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_import_path_of_programs_leads_to_the_same_objects(tmp_path):
    python(
        """
        import tinkex.as_tinker
        import tinker
        import tinker.types
        import tinker.types.image_chunk
        from tinker import types
        from tinker.types import tensor_data
        from tinker.types.tensor_data import TensorData
        from tinker.lib.public_interfaces import APIFuture
        from tinker.lib.public_interfaces.service_client import ServiceClient
        from tinker.lib.retry_handler import RetryConfig
        from tinker.proto import tinker_public_pb2
        import tinkex

        assert tinker.types is types is tinkex.types is tensor_data
        assert TensorData is tinkex.TensorData is tinker.types.tensor_data.TensorData
        assert tinker.types.image_chunk.ImageChunk is tinkex.types.ImageChunk
        assert APIFuture is tinkex.APIFuture is tinker.APIFuture
        assert ServiceClient is tinkex.ServiceClient is tinker.ServiceClient
        assert RetryConfig is tinkex.RetryConfig
        assert tinker_public_pb2.ForwardBackwardRequest(model_id="m").model_id == "m"
        assert isinstance(types.SamplingParams(), tinkex.SamplingParams)
        assert issubclass(tinker.NotFoundError, tinkex.TinkerError)
        """,
        tmp_path,
    )


def test_the_version_is_the_one_of_the_supported_official_client(tmp_path):
    said = python(
        """
        import tinkex.as_tinker, tinker, tinkex
        from importlib import metadata
        print(tinker.__version__, metadata.version("tinker"), tinker.__title__)
        assert metadata.version("tinkex") == tinkex.__version__ != tinker.__version__
        assert set(tinker.__all__) <= set(dir(tinker))
        """,
        tmp_path,
    )
    assert said == "0.36.0 0.36.0 tinker"


def test_a_missing_name_raises_the_usual_error(tmp_path):
    said = python(
        """
        import tinkex.as_tinker, tinker
        try:
            import tinker.nothing
        except ModuleNotFoundError as error:
            print(error)
        try:
            import tinker.types.nothing
        except ModuleNotFoundError as error:
            print(error)
        try:
            tinker.Nothing
        except AttributeError as error:
            print(error)
        """,
        tmp_path,
    ).splitlines()
    assert said[:2] == [
        "No module named 'tinker.nothing'",
        "No module named 'tinker.types.nothing'",
    ]
    assert "has no attribute 'Nothing'" in said[2]


def test_an_official_client_that_is_already_loaded_is_an_import_error(tmp_path):
    (tmp_path / "tinker.py").write_text("")
    said = python(
        """
        import tinker
        try:
            import tinkex.as_tinker
        except ImportError as error:
            print(error)
        """,
        tmp_path,
    )
    assert "already loaded" in said
    assert "python -m tinkex.as_tinker PROGRAM" in said


def test_an_installed_official_client_is_not_touched(tmp_path):
    (tmp_path / "tinker").mkdir()
    (tmp_path / "tinker" / "__init__.py").write_text("raise SystemExit('the official one')")
    assert python("import tinkex.as_tinker, tinker; print(tinker.Datum.__name__)", tmp_path) == (
        "Datum"
    )


WORKERS = """
import multiprocessing
import sys

import tinker
from neighbour import double


def work(params):
    from importlib import metadata

    assert isinstance(params, tinker.types.SamplingParams)
    return double(params.max_tokens), metadata.version("tinker")


if __name__ == "__main__":
    assert "tinkex" in tinker.ServiceClient.__module__
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.apply(work, [tinker.SamplingParams(max_tokens=4)]), *sys.argv[1:])
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_program_and_its_workers_run_unchanged(method, tmp_path):
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "train.py").write_text(WORKERS)
    (folder / "neighbour.py").write_text("def double(n):\n    return 2 * n\n")

    done = run("-m", "tinkex.as_tinker", "program/train.py", method, "--steps=3", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"(8, '0.36.0') {method} --steps=3\n"


def test_a_module_runs_unchanged_with_its_workers(tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "train.py").write_text(WORKERS)
    (tmp_path / "neighbour.py").write_text("def double(n):\n    return 2 * n\n")

    done = run("-m", "tinkex.as_tinker", "-m", "recipes.train", "spawn", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "(8, '0.36.0') spawn\n"


def test_a_missing_program_or_argument_is_an_error(tmp_path):
    assert "Usage: python -m tinkex.as_tinker" in run("-m", "tinkex.as_tinker", cwd=tmp_path).stderr
    helped = run("-m", "tinkex.as_tinker", "--help", cwd=tmp_path)
    assert (helped.returncode, helped.stdout[:6]) == (0, "Usage:")
    done = run("-m", "tinkex.as_tinker", "nothing.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "nothing.py" in done.stderr


def test_methods_that_programs_patch_on_the_classes_are_those_that_are_called(tmp_path):
    said = python(
        """
        import asyncio
        import tinkex.as_tinker
        import tinker
        from tinkex.testing import FakeService

        calls = []

        def patch(owner, name):
            original = getattr(owner, name)
            def patched(self, *args, **kwargs):
                calls.append(name)
                return original(self, *args, **kwargs)
            setattr(owner, name, patched)

        patch(tinker.SamplingClient, "sample")
        patch(tinker.SamplingClient, "sample_async")
        patch(tinker.TrainingClient, "forward_backward")
        patch(tinker.TrainingClient, "forward_backward_async")

        async def main(service):
            training = await service.create_lora_training_client_async("fake/model")
            prompt = tinker.ModelInput.from_ints([1, 2])
            datum = tinker.Datum(model_input=prompt, loss_fn_inputs={
                "target_tokens": [2, 3], "weights": [1.0, 1.0]})
            await (await training.forward_backward_async([datum], "cross_entropy"))
            sampling = await training.save_weights_and_get_sampling_client_async()
            await sampling.sample_async(prompt, 1, tinker.SamplingParams(max_tokens=1))
            await sampling.sample(prompt, 1, tinker.SamplingParams(max_tokens=1))

        service = FakeService().client()
        asyncio.run(main(service))
        service.close("success").result()
        print(*calls)
        """,
        tmp_path,
    )
    # As in the official client, an `_async` variant calls the other one.
    assert said.split() == [
        "forward_backward_async",
        "forward_backward",
        "sample_async",
        "sample",
        "sample",
    ]
