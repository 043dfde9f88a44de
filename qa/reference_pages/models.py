"""Writes the tables of docs/reference/models.md: python -m qa.reference_pages.models"""

import dataclasses
import itertools
from pathlib import Path

from tinkex.engine.model_fit import Candidate, Fit, Machine, fit
from tinkex.models.families import FAMILIES
from tinkex.models.line_up import LineUpModel, line_up
from tinkex.wire.text_format import format_bytes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
REPORTS = ROOT / "benchmarks" / "results"

RANK = 32
H200 = Machine(device="cuda", name="H200", free=149 * 10**9, total=149 * 10**9)


def families_table() -> str:
    rows = []
    for family in FAMILIES:
        served = "served" if family.served else "refused"
        rows.append(
            f"| `{family.name}` | {served} |" + (f" {family.notes} |" if family.notes else " |")
        )
    return "\n".join(["| family | | notes |", "|---|---|---|", *rows])


def line_up_table() -> str:
    head = (
        "| models | family | | adapters change, or why it is refused | weights | adapter in training "
        "| adapter for sampling | KV cache, 1,000 tokens | one H200 | measured there, tokens/s |"
    )
    groups = itertools.groupby(line_up(), key=lambda model: dataclasses.replace(model, name=""))
    rows = [_row([model.name for model in models], like) for like, models in groups]
    return "\n".join([head, "|---|---|---|---|--:|--:|--:|--:|---|---|", *rows])


def _row(names: list[str], like: LineUpModel) -> str:
    found = fit(Candidate.of_line_up(like), H200, element=2, rank=RANK)
    candidate, needs = found.candidate, found.needs
    served = bool(candidate.served)
    sizes = ["unknown"] * 3
    if needs is not None:
        numbers = (needs.training_adapter, needs.sampler_adapter, 1000 * needs.kv_bytes_per_token)
        sizes = [format_bytes(number) for number in numbers]
    cells = [
        ", ".join(names),
        f"`{like.type}`",
        "served" if served else "refused",
        candidate.trained if served else candidate.reason,
        "unknown" if found.weights is None else format_bytes(found.weights),
        *(sizes if served else [""] * 3),
        _fits(found) if served else "",
        _measured(like) if served else "",
    ]
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _fits(found: Fit) -> str:
    if found.fits:
        return f"yes, {found.adapters} adapter{'s' * (found.adapters != 1)}"
    if found.fits is None:
        return "unknown"
    return "no" if found.needed is None else f"no, needs {format_bytes(found.needed)}"


def _measured(model: LineUpModel) -> str:
    return (
        ", ".join(
            f"{each.what} [{each.tokens_per_s:,}](../../benchmarks/results/{each.report})"
            for each in model.measured
        )
        or "not measured"
    )


TABLES = {"families": families_table, "line-up": line_up_table}


def page(text: str) -> str:
    """The page with its tables written anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table()}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
