"""
Hostile custom losses for the engine's interpreter: random graphs that try to use much memory or time.

    python -m qa.fuzz.custom_loss_graphs COUNT SEED      prints one line of JSON

Each graph must run, or be rejected as a user error. Findings are other errors, runs far over the
deadline, and memory that is not released.
"""

import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from tinkex.engine.training.custom_loss_arguments import Parameter
from tinkex.engine.training.custom_loss_graph import Graph
from tinkex.engine.training.custom_loss_ops import FUNCTIONS, METHODS, Operation
from tinkex.wire.custom_loss import CreateCustomLossRequest
from tinkex.wire.errors import UserFailure

#: Graphs that once used unlimited memory: each has a large and an empty dimension.
CORPUS = Path(__file__).resolve().parents[2] / "tests" / "data" / "fuzz" / "graphs.jsonl"
DEADLINE_S = 2.0
# A single operation is not interrupted; the largest allowed one is slow on a busy machine.
MAX_RUN_S = 20.0
#: Allowed peak memory: eight times the largest value, and as much in the backward pass.
MAX_BYTES = 3 * 2**30

LENGTH = 257
ODD: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 64, 4096, 2**20, 2**31, -(2**31), 2**62, 0.5, -1e308, 1e-300),
    *(None, True, False, "", "sum", "ij,jk->ik", "i,j->ij", "a" * 65),
    *([], [0], [1, -1], [2**20, 2**20], [64, 64], [[0]], {"tuple": []}, {"tuple": [4096, 4096]}),
    *({"float": "nan"}, {"float": "inf"}, {"dtype": "int64"}, {"dtype": "float64"}),
    *({"dtype": "bool"}, {"slice": [None, None, 2]}, {"slice": [0, 2**40, 1]}, {"ellipsis": True}),
    *([0, 2**27], {"tuple": [0, 1, 2**27]}, {"tuple": [2**27, 0]}),
    *("none", "floor", "fro", "elementwise_mean", {"memory_format": "contiguous_format"}),
    *({"ref": "nobody"}, {"device": "cuda:0"}, {"device": "meta"}, {"layout": "strided"}),
)
#: Keywords that torch accepts for some operations, and others.
STRAY = ("out", "names", "inplace", "generator", "dtype", "device", "size", "dim", "x", "self", "")
#: Tensors without dimensions, which torch accepts in place of integers.
WHOLE = ("int8", "uint8", "int16", "int32", "int64")
#: Operations whose output is larger than their input.
GROWING = (
    ("call_function", "torch.cat", lambda x: [[x] * 8]),
    ("call_function", "torch.stack", lambda x: [[x] * 16]),
    ("call_function", "torch.outer", lambda x: [x, x]),
    ("call_function", "torch.matmul", lambda x: [x, x]),
    ("call_function", "torch.einsum", lambda x: ["i,j->ij", x, x]),
    ("call_method", "repeat", lambda x: [x, 64]),
    ("call_method", "expand", lambda x: [x, 4096, -1]),
    ("call_method", "unsqueeze", lambda x: [x, 0]),
    ("call_method", "cumsum", lambda x: [x, 0]),
    ("call_function", "operator.mul", lambda x: [x, x]),
    ("call_function", "torch.diag", lambda x: [x]),
    ("call_function", "torch.sum", lambda x: [x, 0]),
    ("call_method", "new_zeros", lambda x: [x, 0, 2**20]),
    ("call_function", "operator.getitem", lambda x: [x, {"slice": [0, 0, None]}]),
    ("call_function", "torch.nn.functional.pad", lambda x: [x, [0, 2**20]]),
)


def random_graph(draw: random.Random) -> dict[str, Any]:
    """A random graph of one of several hostile styles."""
    names = ["logprobs", "extra"]
    nodes: list[dict[str, Any]] = [
        {"op": "placeholder", "name": name, "target": name} for name in names
    ]
    for dtype in WHOLE if draw.random() < 0.3 else ():
        made = {"op": "call_function", "name": dtype, "target": "torch.scalar_tensor"}
        nodes.append(made | {"args": [draw.choice((0, 1, 64, 127))]})
        nodes[-1]["kwargs"] = {"dtype": {"dtype": dtype}}
        names.append(dtype)
    style = draw.choice(["growing", "random", "random", "long", "broken"])
    # Most operations fail with random arguments, so only short graphs reach their end.
    longest = {"growing": 10, "random": 5, "long": 2_050, "broken": 5}[style]
    length = draw.randint(1, longest)
    for number in range(length):
        name = f"n{number}"
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        if style == "growing" or (style == "long" and draw.random() < 0.05):
            op, target, args_of = draw.choice(GROWING)
            args = args_of({"ref": names[-1] if draw.random() < 0.8 else draw.choice(names)})
        elif style == "long":
            op, target, args = "call_function", "torch.exp", [{"ref": names[-1]}]
        else:
            op = draw.choice(["call_function", "call_method"])
            table = FUNCTIONS if op == "call_function" else METHODS
            target = draw.choice(sorted(table))
            args = [_argument(draw, names) for _ in range(draw.choice((1, 1, 2, 2, 3, 4)))]
            if draw.random() < 0.9:
                args[0] = {"ref": draw.choice(names)}
            if draw.random() < 0.7:
                args = [_fitting(draw, one, names) for one in table[target].parameters]
                args = args[: draw.randint(1, max(1, len(args)))]
            if draw.random() < 0.5:
                args, kwargs = _by_keyword(draw, table[target], args)
            if draw.random() < 0.1:
                kwargs[draw.choice(STRAY)] = _argument(draw, names)
        nodes.append({"op": op, "name": name, "target": target, "args": args, "kwargs": kwargs})
        names.append(name)
    if style == "broken":
        _break(nodes, draw)
    total = {"op": "call_function", "name": "loss", "target": "torch.sum"}
    nodes.append({**total, "args": [{"ref": names[-1]}], "kwargs": {}})
    out = [{"tuple": [{"ref": "loss"}, {"dict": {}}]}]
    nodes.append({"op": "output", "name": "output", "target": "output", "args": out})
    return {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": style,
        "inputs": [{"name": "logprobs", "rank": 1}, {"name": "extra", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
    }


def _by_keyword(
    draw: random.Random, operation: Operation, args: list[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Passes the last arguments by the names of any parameters that follow, in any order."""
    at = draw.randint(0, len(args))
    names = [parameter.name for parameter in operation.parameters[at:]]
    draw.shuffle(names)
    return args[:at], dict(zip(names, args[at:], strict=False))


def _fitting(draw: random.Random, parameter: Parameter, names: list[str]) -> Any:
    """A plain value of the right kind, or any node."""
    plain = [value for value in ODD if not isinstance(value, dict) and parameter.test(value)]
    return draw.choice(plain) if plain and draw.random() < 0.7 else {"ref": draw.choice(names)}


def _argument(draw: random.Random, names: list[str]) -> Any:
    if draw.random() < 0.5:
        return {"ref": draw.choice(names)}
    return [{"ref": draw.choice(names)}] * 3 if draw.random() < 0.1 else draw.choice(ODD)


def _break(nodes: list[dict[str, Any]], draw: random.Random) -> None:
    node = draw.choice(nodes)
    field = draw.choice(["op", "name", "target", "args", "kwargs"])
    deep: Any = 0
    for _ in range(150):
        deep = {"tuple": [deep]}
    node[field] = draw.choice(
        [
            *("get_attr", "call_module", "os.system", "__class__", "torch.load", "", "x" * 500),
            *(None, 5, [deep], {"out": {"ref": "logprobs"}}, {"x" * 300: 1}, [[0] * 300]),
        ]
    )


def corpus() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CORPUS.read_text().splitlines()]


def outcome_of(wire: dict[str, Any]) -> str:
    """Runs a graph: ran, refused, malformed, or what is wrong."""
    draw = torch.Generator().manual_seed(0)
    logprobs = torch.randn(LENGTH, generator=draw)
    batch = torch.cat((logprobs, logprobs * 2))  # inputs are views of a batch
    kept = batch.clone()
    try:
        request = CreateCustomLossRequest.model_validate(wire)
        graph = Graph.parse(request.name, request.inputs, request.graph)
        views = batch[:LENGTH], {"extra": batch[LENGTH:]}
        graph.value_and_gradient(*views, deadline_s=DEADLINE_S)
    except UserFailure as failure:
        return "refused" if len(str(failure)) < 1_000 else f"a refusal of {len(str(failure))}"
    except ValidationError:
        return "malformed"
    return "ran" if torch.equal(batch, kept) else "changed its inputs"


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def fuzz(count: int, seed: int) -> dict[str, Any]:
    """Runs this many random graphs."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    outcomes: Counter[str] = Counter()
    wrong, memory, slowest_s = [], [], 0.0
    outcome_of(random_graph(random.Random(0)))
    before = resident_bytes()
    began = time.monotonic()
    for number in range(count):
        wire = random_graph(draw)
        started = time.monotonic()
        try:
            outcome = outcome_of(wire)
        except Exception as error:  # noqa: BLE001  any other error is a finding
            outcome = f"{type(error).__name__}: {str(error)[:200]}"
        took_s = time.monotonic() - started
        slowest_s = max(slowest_s, took_s)
        if outcome not in ("ran", "refused", "malformed"):
            wrong.append(f"graph {number}: {outcome}: {json.dumps(wire)[:4000]}")
            outcome = "wrong"
        if took_s > MAX_RUN_S:
            wrong.append(f"graph {number} took {took_s:.1f} s: {json.dumps(wire)[:4000]}")
        outcomes[outcome] += 1
        memory.append(resident_bytes())
    quarter = max(1, count // 4)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if peak - before > MAX_BYTES:
        wrong.append(f"peak memory grew by {peak - before} bytes; {MAX_BYTES} are allowed")
    return {
        "outcomes": dict(outcomes),
        "wrong": wrong,
        "took_s": round(time.monotonic() - began, 1),
        "slowest_s": round(slowest_s, 2),
        "first_quarter_bytes": sum(memory[:quarter]) / quarter,
        "last_quarter_bytes": sum(memory[-quarter:]) / quarter,
        "peak_growth_bytes": peak - before,
    }


if __name__ == "__main__":
    print(json.dumps(fuzz(int(sys.argv[1]), int(sys.argv[2]))))
