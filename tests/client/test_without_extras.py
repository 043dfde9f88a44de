"""The core client without optional packages."""

import subprocess
import sys
import textwrap

#: Simulates an environment in which these are not installed.
ABSENT = (
    "import sys\n"
    "for name in ('torch', 'transformers', 'tokenizers', 'huggingface_hub', 'zstandard', 'jinja2',"
    " 'click', 'rich', 'httpx', 'opentelemetry'):\n"
    "    sys.modules[name] = None\n"
)


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ABSENT + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_m4_every_data_path_works_with_numpy_alone():
    run("""
        import pickle
        import numpy as np
        import tinkex
        from tinkex import types
        from tinkex.testing import FakeService

        sparse = types.TensorData(data=[5.0], dtype="float32", shape=[2, 3],
                                  sparse_crow_indices=[0, 0, 1], sparse_col_indices=[2])
        assert sparse.to_numpy().tolist() == [[0, 0, 0], [0, 0, 5]]
        tokens = np.arange(4)
        data = [
            types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)
            for inputs in (
                {"target_tokens": tokens[1:], "weights": np.ones(3)},
                {"target_tokens": [1, 2, 3], "weights": [1.0, 0.5, 0.0]},
                {"target_tokens": types.TensorData.from_numpy(tokens[1:]), "weights": (1, 1, 1)},
            )
        ]
        data.append(pickle.loads(pickle.dumps(types.Datum.model_validate(data[0].model_dump()))))
        with FakeService().client() as service:
            training = service.create_lora_training_client("fake/model")
            passed = training.forward_backward(data, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-4)).result(10)
            for output in passed.result(10).loss_fn_outputs:
                assert output["logprobs"].to_numpy().shape == (3,)
            path = training.save_state("a").result(10).path
            service.create_training_client_from_state(path).forward(data, "cross_entropy").result(10)
            sampling = training.save_weights_and_get_sampling_client()
            prompt = types.ModelInput.from_ints([1, 2]).append_int(3)
            drawn = sampling.sample(prompt, 2, types.SamplingParams(max_tokens=3)).result(10)
            assert drawn.sequences[0].tokens_np.dtype == np.int32
            assert len(sampling.compute_logprobs(prompt).result(10)) == 3
    """)


def test_m3_what_needs_an_extra_says_which_and_nothing_else_breaks():
    run("""
        import tinkex, tinkex.regularizers
        from tinkex import types
        from tinkex.testing import FakeService

        def error_of(work, kind):
            try:
                work()
            except kind as error:
                return str(error)
            raise AssertionError("no error")

        with FakeService().client() as service:
            training = service.create_lora_training_client("fake/model")
            datum = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [1]})
            def custom():
                training.forward_backward_custom([datum], lambda *_: None)
            assert "pip install torch" in error_of(custom, ImportError)
            def traced():
                service.create_custom_loss(lambda logprobs: (logprobs.sum(), {}), {"logprobs": 1})
            assert "pip install torch" in error_of(traced, ImportError)
            assert "tinkex[tokenizer]" in error_of(training.get_tokenizer, tinkex.TinkerError)
            tensor = types.TensorData(data=[1], dtype="int64")
            assert "tinkex[engine]" in error_of(tensor.to_torch, ImportError)
            assert "TensorData.to_torch() needs torch" in error_of(tensor.to_torch, ImportError)
    """)
