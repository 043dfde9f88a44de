"""
Measures how much of a recorded API surface another package provides.

    python -m qa.api_surface.compare [--package tinkex] [--baseline FILE] [--python EXE]
                          [--json] [--show N] [--fail-under PCT]

The baseline is the JSON that extract.py printed for the reference package. It consists of single checks
(one export, one method, one signature, one field, one option ...). Parity is the share of checks that
the other package passes, over the headline categories. Secondary categories (internal constructors,
client attributes, submodule import paths) are reported separately and do not change that figure.

A package that cannot be imported scores 0. The exit status is 0 unless --fail-under is given.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
DEFAULT_BASELINE = HERE.parents[1] / "tests" / "data" / "api-surface.json"
DEFAULT_EXTRACTOR = HERE / "extract.py"
EXTRACT_TIMEOUT_S = 180

HEADLINE = OrderedDict(
    [
        ("exports", "names exported by the package, .types and .auth"),
        ("kinds", "what each name is (class, literal, union, ...)"),
        ("members", "public methods and properties"),
        ("signatures", "parameters, their kinds and defaults, sync or async"),
        ("fields", "model and dataclass fields"),
        ("field specs", "required flag, default, aliases, bounds"),
        ("model config", "extra-field policy and immutability"),
        ("model methods", "validate, dump and copy helpers of the models"),
        ("values", "literal, union and enum members"),
        ("exceptions", "ancestry, attributes, status codes"),
        ("cli commands", "command tree"),
        ("cli options", "options and arguments of each command"),
    ]
)
SECONDARY = OrderedDict(
    [
        ("internal constructors", "constructors that take the internal holder"),
        ("client attributes", "attributes set on instances"),
        ("import paths", "public submodules and what they export"),
    ]
)

MISSING, DIFFERENT = "missing", "different"


class Check(NamedTuple):
    category: str
    key: str
    expected: Any
    actual: Any
    outcome: str | None  # None passes

    @property
    def ok(self) -> bool:
        return self.outcome is None


def check(category: str, key: str, expected: Any, actual: Any) -> Check:
    if actual is None and expected is not None:
        return Check(category, key, expected, actual, MISSING)
    return Check(category, key, expected, actual, None if expected == actual else DIFFERENT)


# ------------------------------------------------------------------ shapes that are compared


def signature_shape(entry: dict[str, Any] | None) -> list[list[Any]] | None:
    """Names, kinds and defaults. Parameters with a leading underscore are private."""
    if entry is None:
        return None
    return [
        [p["name"], p["kind"], p.get("default")]
        for p in entry["params"]
        if not p["name"].startswith("_")
    ]


def takes_holder(entry: dict[str, Any] | None) -> bool:
    return bool(entry and entry["params"] and entry["params"][0]["name"].lstrip("_") == "holder")


def field_shape(entry: dict[str, Any]) -> dict[str, Any]:
    keys = ("required", "default", "aliases", "constraints", "kw_only")
    return {k: entry[k] for k in keys if k in entry}


def package_ancestry(mro: list[str]) -> list[str]:
    return [n for n in mro if n not in ("BaseException", "object", "Generic", "Protocol", "ABC")]


# ------------------------------------------------------------------ checks


def class_checks(path: str, want: dict[str, Any], have: dict[str, Any] | None) -> Iterator[Check]:
    have = have if have and have.get("kind") == "class" else {}
    is_exception = want.get("flavour") in ("exception", "warning")

    have_offers = (
        set(have.get("members", ())) | set(have.get("fields", ())) | set(have.get("attributes", ()))
    )
    for name, member in want.get("members", {}).items():
        other = have.get("members", {}).get(name)
        key = f"{path}.{name}"
        if is_exception and member["kind"] == "class_attribute":
            yield check("exceptions", key, member["value"], (other or {}).get("value"))
            continue
        if member["kind"] in ("property", "class_attribute"):
            # A plain field or attribute serves the same reads as a property.
            yield check("members", key, True, True if name in have_offers else None)
            continue
        internal = takes_holder(member.get("signature"))
        yield check(
            "internal constructors" if internal else "members",
            key,
            True,
            True if other and other["kind"] in ("method", "classmethod", "staticmethod") else None,
        )
        if name.startswith("__") or internal:
            continue
        shape = signature_shape(member.get("signature"))
        other_shape = signature_shape((other or {}).get("signature"))
        yield check(
            "signatures",
            key,
            {"params": shape, "async": member.get("async", False), "binding": member["kind"]},
            {"params": other_shape, "async": other.get("async", False), "binding": other["kind"]}
            if other and other_shape is not None
            else None,
        )

    for name, field in want.get("fields", {}).items():
        other = have.get("fields", {}).get(name)
        yield check("fields", f"{path}.{name}", True, True if other else None)
        yield check(
            "field specs",
            f"{path}.{name}",
            field_shape(field),
            field_shape(other) if other else None,
        )

    for key, value in want.get("config", {}).items():
        yield check("model config", f"{path} {key}", value, have.get("config", {}).get(key))

    if want.get("model_api"):
        yield check("model methods", path, want["model_api"], have.get("model_api"))

    for name, value in want.get("values", {}).items():
        yield check("values", f"{path}.{name}", value, have.get("values", {}).get(name))

    if is_exception:
        yield check(
            "exceptions",
            f"{path} ancestry",
            package_ancestry(want["mro"]),
            package_ancestry(have["mro"]) if have else None,
        )
    for name in want.get("attributes", ()):
        yield check(
            "exceptions" if is_exception else "client attributes",
            f"{path}.{name}",
            True,
            True if name in have_offers else None,
        )

    if want.get("init") is not None:  # for dataclasses this also pins the positional order
        internal = takes_holder(want["init"]) and want["init"]["params"][0]["name"] == "holder"
        yield check(
            "internal constructors" if internal else "signatures",
            f"{path}()",
            signature_shape(want["init"]),
            signature_shape(have.get("init")),
        )


def usable(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """Whether a name can be resolved, not only listed."""
    return None if entry is None or entry["kind"] in ("unresolved", "error") else entry


def object_checks(
    path: str,
    want: dict[str, Any],
    have: dict[str, Any] | None,
    elsewhere: dict[str, Any] | None = None,
) -> Iterator[Check]:
    """``elsewhere``: the same name in another module, whose details still count."""
    have = usable(have)
    yield check("exports", path, True, True if have else None)
    have = have or usable(elsewhere)
    kind = want["kind"]
    if kind in ("value", "unresolved"):
        return
    have_kind = have["kind"] if have else None
    if kind == "alias" and have_kind == "class":
        have_kind = "alias"  # an own class in place of a re-exported one serves the same callers
    yield check("kinds", path, kind, have_kind)
    if kind == "class":
        yield from class_checks(path, want, have)
    elif kind == "literal":
        yield check(
            "values",
            path,
            sorted(map(str, want["values"])),
            sorted(map(str, have["values"])) if have and have["kind"] == "literal" else None,
        )
    elif kind == "union":
        yield check(
            "values",
            path,
            want["members"],
            have["members"] if have and have["kind"] == "union" else None,
        )
    elif kind == "function":
        yield check(
            "signatures",
            path,
            signature_shape(want["signature"]),
            signature_shape(have.get("signature")) if have else None,
        )


def cli_checks(want: dict[str, Any], have: dict[str, Any] | None, path: str) -> Iterator[Check]:
    have = have or {}
    for name, option in want["options"].items():
        shape = {
            k: v for k, v in option.items() if k != "type" or v in ("flag", "choice", "integer")
        }
        other = have.get("options", {}).get(name)
        other_shape = None
        if other is not None:
            other_shape = {
                k: v for k, v in other.items() if k != "type" or v in ("flag", "choice", "integer")
            }
        yield check("cli options", f"{path} {name}", shape, other_shape)
    if want["arguments"]:
        yield check(
            "cli options",
            f"{path} (arguments)",
            [[a["nargs"], a["required"]] for a in want["arguments"]],
            [[a["nargs"], a["required"]] for a in have["arguments"]]
            if have.get("arguments")
            else None,
        )
    for name, child in want.get("commands", {}).items():
        other = have.get("commands", {}).get(name)
        yield check("cli commands", f"{path} {name}", True, True if other is not None else None)
        yield from cli_checks(child, other, f"{path} {name}")


def all_checks(want: dict[str, Any], have: dict[str, Any]) -> Iterator[Check]:
    seen: set[str] = set()
    have_modules = have.get("modules", {})
    anywhere: dict[str, Any] = {}
    for module in have_modules.values():
        anywhere.update({n: e for n, e in module["names"].items() if usable(e)})
    for module in sorted(want["modules"], key=lambda m: (m != ".", m)):
        names = want["modules"][module]["names"]
        have_names = have_modules.get(module, {}).get("names", {})
        prefix = "" if module == "." else f"{module}."
        for name, entry in names.items():
            if name in seen:  # re-exported: its details were checked once already
                yield check(
                    "exports", prefix + name, True, True if usable(have_names.get(name)) else None
                )
                continue
            seen.add(name)
            yield from object_checks(prefix + name, entry, have_names.get(name), anywhere.get(name))
    for path, entry in want.get("extra", {}).items():
        yield from object_checks(path, entry, have.get("extra", {}).get(path))
    if want.get("cli"):
        yield from cli_checks(want["cli"], have.get("cli"), "$")
    have_paths = have.get("import_paths", {})
    for path, names in want.get("import_paths", {}).items():
        yield check("import paths", path, True, True if path in have_paths else None)
        for name in names:
            yield check(
                "import paths",
                f"{path}:{name}",
                True,
                True if name in have_paths.get(path, ()) else None,
            )


# ------------------------------------------------------------------ running and reporting


def extract_surface(
    package: str, python: str, extractor: Path, cli: str | None, paths: list[str]
) -> tuple[dict[str, Any], str | None]:
    """The surface of the other package, or an empty one and the reason."""
    command = [python, str(extractor), package, "--indent", "0", "--paths", json.dumps(paths)]
    if cli:
        command += ["--cli", cli]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=EXTRACT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return {}, f"could not inspect {package}: {type(exc).__name__}"
    if run.returncode != 0:
        tail = (run.stderr.strip().splitlines() or ["no output"])[-1]
        return {}, tail
    try:
        return json.loads(run.stdout), None
    except ValueError:
        return {}, f"the surface of {package} was not valid JSON"


def tally(checks: list[Check], categories: OrderedDict[str, str]) -> dict[str, Any]:
    rows = {}
    for category in categories:
        own = [c for c in checks if c.category == category]
        if own:
            passed = sum(c.ok for c in own)
            rows[category] = {
                "passed": passed,
                "total": len(own),
                "percent": round(100 * passed / len(own), 2),
            }
    passed = sum(r["passed"] for r in rows.values())
    total = sum(r["total"] for r in rows.values())
    return {
        "passed": passed,
        "total": total,
        "percent": round(100 * passed / total, 2) if total else 0.0,
        "by": rows,
    }


def compare(want: dict[str, Any], have: dict[str, Any], note: str | None) -> dict[str, Any]:
    checks = list(all_checks(want, have))
    failures = [c for c in checks if not c.ok]
    return {
        "reference": f"{want['package']} {want['version']}",
        "package": have.get("package"),
        "version": have.get("version"),
        "note": note,
        "headline": tally(checks, HEADLINE),
        "secondary": tally(checks, SECONDARY),
        "failures": [
            {
                "category": c.category,
                "outcome": c.outcome,
                "name": c.key,
                "expected": c.expected,
                "actual": c.actual,
            }
            for c in failures
        ],
    }


def short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 150 else text[:147] + "..."


def print_report(report: dict[str, Any], show: int) -> None:
    head, second = report["headline"], report["secondary"]
    print(
        f"API parity with {report['reference']}: {head['percent']:.2f}%  ({head['passed']}/{head['total']} checks)"
    )
    if report["note"]:
        print(f"note: {report['note']}")
    for category, row in head["by"].items():
        print(f"  {category:<22}{row['percent']:>7.2f}%  {row['passed']:>5}/{row['total']}")
    print(f"secondary: {second['percent']:.2f}%  ({second['passed']}/{second['total']})")
    for category, row in second["by"].items():
        print(f"  {category:<22}{row['percent']:>7.2f}%  {row['passed']:>5}/{row['total']}")
    for outcome in (MISSING, DIFFERENT):
        for category in [*HEADLINE, *SECONDARY]:
            group = [
                f
                for f in report["failures"]
                if f["outcome"] == outcome and f["category"] == category
            ]
            if not group:
                continue
            print(f"\n{outcome} - {category} ({len(group)})")
            for failure in group[:show]:
                line = f"  {failure['name']}"
                if outcome == DIFFERENT:
                    line += f"\n      expected {short(failure['expected'])}\n      got      {short(failure['actual'])}"
                print(line)
            if len(group) > show:
                print(f"  ... {len(group) - show} more (--show {len(group)} or --json)")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--package", default="tinkex")
    parser.add_argument("--baseline", type=Path, default=DEFAULT_BASELINE)
    parser.add_argument("--extractor", type=Path, default=DEFAULT_EXTRACTOR)
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter that can import the package"
    )
    parser.add_argument("--cli", help="MODULE:ATTR of the package's click group or argparse parser")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument("--show", type=int, default=12, help="names listed per group")
    parser.add_argument("--fail-under", type=float, help="exit 1 below this headline percentage")
    args = parser.parse_args(argv)

    try:
        want = json.loads(args.baseline.read_text())
    except (OSError, ValueError) as exc:
        print(f"no usable baseline ({type(exc).__name__}): {args.baseline.name}", file=sys.stderr)
        return 2
    paths = list(want.get("import_paths", {}))
    have, note = extract_surface(args.package, args.python, args.extractor, args.cli, paths)
    if args.package != want["package"] and want["package"] in have.get("loaded_packages", ()):
        have, note = (
            {},
            f"{args.package} imports {want['package']} itself; a borrowed surface counts for nothing",
        )
    report = compare(want, have, note)
    report["package"] = report["package"] or args.package
    if args.json:
        json.dump(report, sys.stdout, indent=1, default=str)
        print()
    else:
        print_report(report, args.show)
    if args.fail_under is not None and report["headline"]["percent"] < args.fail_under:
        return 1
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pager is not an error
    sys.exit(main())
