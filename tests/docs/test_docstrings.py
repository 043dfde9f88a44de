"""Docstrings of the public API name every parameter, and their examples run."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinkex
from tinkex.models.tokenizer import Tokenizer, load_tokenizer
from tinkex.testing import Answer, FakeService
from tinkex.wire.base import LenientModel, Payload, StrictModel

MODEL = "fake/model"
SECTION = re.compile(r"^(Args|Returns|Raises|Example):$", re.MULTILINE)


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, and the public methods of every public class, by name."""
    found = {name: getattr(tinkex, name) for name in tinkex.__all__}
    found |= {"Tokenizer": Tokenizer, "load_tokenizer": load_tokenizer}
    for name, each in found.items():
        if inspect.isfunction(each):
            yield name, each
        elif inspect.isclass(each) and has_documented_methods(each):
            yield from methods(name, each)


def has_documented_methods(each: type) -> bool:
    """Whether it is more than data: the fields of wire types have comments in their source."""
    is_data = issubclass(each, (StrictModel, LenientModel, Payload, Exception))
    return each.__module__.startswith("tinkex.") and not is_data


def methods(name: str, owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for key in dir(owner):
        method = inspect.getattr_static(owner, key)
        method = getattr(method, "__func__", method)
        written = key in ("__init__", "__call__") and "tinkex" in getattr(method, "__module__", "")
        if not inspect.isfunction(method) or (key.startswith("_") and not written):
            continue
        if key == "__init__" and name not in ("ServiceClient", "RestClient", "AdminClient"):
            continue  # created by other clients, or by a dataclass
        yield f"{name}.{key}", method


PUBLIC = dict(public())


def sections(function: Callable[..., Any]) -> dict[str, str]:
    text = inspect.cleandoc(function.__doc__ or "")
    parts = SECTION.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def example(function: Callable[..., Any]) -> str:
    """The indented lines of the section; what follows is text again."""
    lines = sections(function).get("Example", "").strip("\n").splitlines()
    code = [line for line in lines if not line or line.startswith("    ")]
    return textwrap.dedent("\n".join(code)).strip() + "\n"


def test_the_clients_are_among_what_is_checked():
    assert len(PUBLIC) > 130
    for name in ("ServiceClient.__init__", "TrainingClient.forward_backward", "progress"):
        assert name in PUBLIC
    for name in ("SamplingClient.sample_async", "RestClient.whoami", "APIFuture.result"):
        assert name in PUBLIC
    assert "Tokenizer.apply_chat_template" in PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_the_docstring_says_what_goes_in_and_what_comes_out(name: str) -> None:
    function = PUBLIC[name]
    documented = sections(function)
    parameters = [
        each
        for each in inspect.signature(function).parameters
        if each not in ("self", "cls") and not each.startswith("_")
    ]
    arguments = re.findall(r"^    (\w+): \S", documented.get("Args", ""), re.MULTILINE)
    assert arguments == parameters
    returns = inspect.signature(function).return_annotation
    if not name.endswith(".__init__") and returns not in ("None", None):
        assert documented.get("Returns", "").strip()
    code = example(function)
    assert code.strip()
    compile(code, name, "exec")


# -- the examples run ------------------------------------------------------------------------------

#: Without effect on the fake service, or in need of something that it does not have.
NOT_RUN = {
    "download_checkpoint": "needs the files of a checkpoint",
    "get_tokenizer": "the fake model has no tokenizer",
    "encode": "the fake model has no tokenizer",
    "decode": "the fake model has no tokenizer",
    "from_sampler_handle": "connects to a real address",
    "whoami": "the fake key names no owner",
    "create_custom_loss": "needs torch, and has tests of its own",
    "forward_backward_custom": "needs torch, and has tests of its own",
}

TIME = "2026-11-16T00:00:00Z"
LINK = {"url": "http://fake.invalid/file", "expires": TIME}
#: Answers of endpoints that the fake service does not have, by method.
ANSWERS: dict[str, tuple[str, Any]] = {
    "get_session": ("sessions/s-1", {"training_run_ids": [], "sampler_ids": []}),
    "list_sessions": ("sessions", {"sessions": ["s-1"]}),
    "all_sessions": ("sessions", {"sessions": ["s-1"]}),
    "search_sessions": ("sessions/search", {"sessions": []}),
    "all_found_sessions": ("sessions/search", {"sessions": []}),
    "export_session_trace": (
        "sessions/s-1/trace_export",
        {"status": "ready", "url": "http://fake.invalid/trace"},
    ),
    "assign_session_project": ("sessions/s-1/project", {}),
    "copy_weights": ("copy_weights", {"tinker_path": "tinker://copy/weights/one"}),
    "get_checkpoint_archive_url": ("training_runs/{run}/checkpoints/weights/0001/archive", LINK),
    "get_checkpoint_archive_url_from_tinker_path": (
        "training_runs/{run}/checkpoints/weights/0001/archive",
        LINK,
    ),
    "get_external_weights_urls": (
        "training_runs/{run}/checkpoints/external_weights/files/external_weights_urls",
        {"urls": {"adapter_model.safetensors": "http://fake.invalid/file"}, "expires": TIME},
    ),
    "get_audit_log": ("audit", {"entries": []}),
    "get_billing_usage": ("billing/usage/events", {"data": []}),
    "get_usage_by_key": ("billing/usage/keys", {"data": []}),
    "get_current_checkpoint_storage_usage": (
        "billing/usage/checkpoints/current",
        {"data": []},
    ),
}


def short_name(name: str) -> str:
    return name.rpartition(".")[2].removesuffix("_async")


#: Each example once: the variant of a method has the same one.
EXAMPLES = {example(function): name for name, function in reversed(PUBLIC.items())}.values()


@pytest.fixture(scope="module")
def tokenizer(tiny_model) -> Tokenizer:
    return load_tokenizer(tiny_model)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::tinkex.ExperimentalWarning")
@pytest.mark.parametrize("name", [name for name in EXAMPLES if short_name(name) not in NOT_RUN])
def test_the_example_runs(name, tiny_model, tokenizer, monkeypatch, capsys):
    fake = FakeService()
    with fake.client(project_id="project-1") as service:
        training = service.create_lora_training_client(MODEL)
        sampling = training.save_weights_and_get_sampling_client()
        if short_name(name) in ANSWERS:
            endpoint, answer = ANSWERS[short_name(name)]
            fake.script(endpoint.format(run=training.model_id), Answer(status=200, body=answer))
        monkeypatch.setattr(tinkex, "ServiceClient", lambda **_: fake.client())
        datum = tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
        )
        given = {
            "tinkex": tinkex,
            "service": service,
            "training": training,
            "sampling": sampling,
            "rest": tinkex.RestClient(service.holder),
            "admin": tinkex.AdminClient(service.holder),
            "tokenizer": tokenizer,
            "load_tokenizer": load_tokenizer,
            "folder": tiny_model,
            "data": [datum],
            "prompt": datum.model_input,
            "path": training.save_state("0001").result().path,
            "futures": [training.forward([datum], "cross_entropy")],
            "MODEL": MODEL,
        }
        exec(compile(example(PUBLIC[name]), name, "exec"), given)  # noqa: S102
    capsys.readouterr()


def test_every_public_class_has_its_own_docstring():
    for name in tinkex.__all__:
        each = getattr(tinkex, name)
        if inspect.isclass(each) and each.__module__.startswith("tinkex."):
            assert each.__dict__.get("__doc__"), name
