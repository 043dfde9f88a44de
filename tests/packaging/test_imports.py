"""The table of allowed imports, and what `import tinkex` loads."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tinkex"

#: What each package or module may import: parts of tinkex, then third-party packages. The longest
#: matching name applies. "~" allows an import only inside functions, so that it loads on first use.
ALLOWED_IMPORTS = {
    "": "client wire types compat",
    "compat": "client wire types",
    "compat.submodule_aliases": "",
    "display": "",
    "extras": "",
    "tracebacks": "",
    "durable_files": "",
    "file_locks": "",
    "local": "~durable_files",
    "as_tinker": "client",
    "lib": "client compat",
    "proto": "wire compat",
    "resources": "compat",
    "types": "wire compat",
    "pytest_plugin": "pytest ~testing",
    "testing": "client wire ~models ~aiohttp",
    "wire": "display extras tracebacks pydantic pydantic_core google ~numpy ~torch ~zstandard",
    "client": "display extras durable_files file_locks local tracebacks wire pydantic ~numpy ~models ~zstandard ~compression",  # compression is Python 3.14's own
    "client.custom_loss": "extras client wire ~numpy ~torch",
    "client.loss_tracing": "extras client wire ~torch",
    "data": "~types",
    "recipes": "data",
    "regularizers": "extras client wire ~torch",
    "metric_writers": "extras ~tensorboardX ~wandb ~trackio",
    "client.observe.instrumentation": "extras client ~opentelemetry",
    "client.observe.progress": "extras client ~rich",
    "client.files.huggingface": "extras client wire ~huggingface_hub",
    "client.http.transport": "client wire ~aiohttp ~yarl",
    "client.tokenizer": "extras client wire ~models ~tokenizers ~transformers ~huggingface_hub",
    "models.tiny_model": "extras ~tokenizers ~torch ~safetensors",
    "models": "display extras file_locks ~numpy ~tokenizers ~huggingface_hub ~jinja2",
    "engine.sampling.guides": "extras wire numpy torch ~llguidance",
    "engine": "durable_files wire models numpy torch ~triton transformers safetensors tokenizers ~gguf",
    "engine.images": "wire models",
    "engine.images.decoder_process": "~PIL",
    "engine.model.decode_ops": "engine.model torch triton",  # itself loaded in functions only
    "engine.model.early_start": "torch triton",
    "engine.model.lora_kernels": "engine.model triton",
    "engine.model.decode_kernels": "engine.model triton",
    "engine.model.expert_decode": "engine.model torch triton",
    "engine.model.expert_kernels": "engine.model triton",
    "engine.model.recurrent_kernels": "torch triton",
    "engine.model.sampling_kernels": "torch triton",
    "engine.model.packed_kernels": "engine.model torch triton",
    "server.queued_request": "",
    "server.scheduler.step_queue": "wire server.queued_request",
    "server.process_setup": "wire server.retry",
    "server.retry": "",
    "server.request_metrics": "server.queued_request starlette",
    "server.process_end": "wire",
    "server.store": "durable_files wire server.queued_request server.retry server.store sqlalchemy alembic fsspec ~aiobotocore ~botocore ~pyrage",
    "server.store.notifier": "server.retry server.store psycopg sqlalchemy",
    "server.folder_lock": "server.settings ~server.store",
    "server.api.connection_limits": "starlette httptools",
    "server.api.local": "local wire server.api server.local_models fastapi starlette",
    "server.executor": "wire",
    "server.prices": "",
    "server.fleet": "local server.process_end server.retry server.settings server.fleet pydantic",
    "server.fleet.ray_cluster": "server.fleet ~ray",
    "server.engine_process": "wire server.executor server.process_end server.retry",
    "server.api.openai_guides": "extras models wire server.api ~llguidance",
    "server.api": "local wire models server.request_metrics server.queued_request server.store server.scheduler server.executor server.prices server.settings fastapi starlette pydantic prometheus_client jwt",
    "server": "durable_files local wire models server uvicorn prometheus_client fastapi starlette pydantic",
    "conformance": "wire numpy",
    "conformance.conftest": "conformance pytest",
    "conformance.test_server": "conformance pytest",
    "cli": "client local conformance data recipes durable_files file_locks wire types models click rich ~server ~engine ~testing ~tokenizers ~matplotlib ~torch ~gguf",
}


def modules():
    return sorted(path for path in SOURCE.rglob("*.py") if "_pb2" not in path.name)


def entry_for(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    while name not in ALLOWED_IMPORTS and name:
        name = name.rpartition(".")[0]
    return name


def imports(path: Path):
    """Imported modules, and whether inside a function; without imports for type checkers."""

    def visit(node, inside):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (found for child in node.orelse for found in visit(child, inside))
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = True
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not allowed"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if node.module == "tinkex" else node.module), inside
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text()), False)


def within(name: str, packages: Iterable[str]) -> bool:
    """Whether a module is in one of the packages: "server.web_process" is in "server"."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_import_is_in_the_table(path):
    entry = entry_for(path)
    words = ALLOWED_IMPORTS[entry].split()
    always = {word for word in words if not word.startswith("~")}
    inside_functions = {word.removeprefix("~") for word in words}
    for imported, inside in imports(path):
        package, _, rest = imported.partition(".")
        if package in sys.stdlib_module_names:
            continue
        name = rest if package == "tinkex" else imported
        if package == "tinkex" and rest and not list(SOURCE.glob(f"{rest.split('.')[0]}*")):
            name = "client"  # `from tinkex import ServiceClient`: the public API
        if package == "tinkex" and (not rest or (entry and within(name, [entry]))):
            continue  # its own package, or the public API
        allowed = inside_functions if inside else always
        when = "" if inside else " when it is loaded"
        assert within(name, allowed), (
            f"{entry or 'tinkex'} may not import {imported}{when} ({path})"
        )


def test_client_and_server_never_import_each_other():
    for path in modules():
        package = entry_for(path).partition(".")[0]
        names = [name for name, _ in imports(path)]
        if package in ("client", "wire", "models", "", "types"):
            assert not [n for n in names if n.startswith(("tinkex.server", "tinkex.engine"))], path
        if package == "server":
            assert not [n for n in names if n.startswith(("tinkex.client", "tinkex.engine"))], path


HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "fastapi",
    "starlette",
    "uvicorn",
    "sqlalchemy",
    "click",
    "rich",
    "ray",
}


def loaded_by(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_importing_tinkex_loads_no_large_package():
    loaded = loaded_by("import tinkex; tinkex.__version__")
    assert not HEAVY & set(loaded)
    assert not {"numpy", "pydantic", "aiohttp", "google.protobuf"} & set(loaded)


def test_using_the_client_loads_no_heavy_package_and_no_numpy_before_the_first_tensor():
    loaded = loaded_by(
        "import tinkex\n"
        "from tinkex import types\n"
        "service = tinkex.ServiceClient(base_url='http://127.0.0.1:9')\n"
        "types.SamplingParams(max_tokens=3), tinkex.TrainingClient, tinkex.SamplingClient\n"
    )
    assert not {*HEAVY, "numpy", "aiohttp"} & set(loaded)


def test_the_first_tensor_loads_numpy_and_still_no_heavy_package():
    loaded = loaded_by("import tinkex; tinkex.TensorData(data=[1], dtype='int64')")
    assert "numpy" in loaded
    assert not HEAVY & set(loaded)


def test_a_web_process_does_not_load_ray():
    entries = "server.web_process", "server.app", "server.cluster.web", "cli.fleet"
    assert "ray" not in loaded_by("\n".join(f"import tinkex.{entry}" for entry in entries))


def test_the_supervisor_loads_no_large_package():
    # It lives as long as the server and must start fast.
    loaded = loaded_by("import tinkex.server.supervisor")
    assert not {*HEAVY, "alembic", "pydantic", "numpy"} & set(loaded)
