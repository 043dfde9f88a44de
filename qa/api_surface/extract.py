# ruff: noqa: BLE001, S112 - inspects arbitrary packages
"""
Prints the public API surface of an importable package as JSON.

    python qa/api_surface/extract.py PACKAGE [--cli MODULE:ATTR] [--no-cli] [--paths JSON] [--indent N]

It records names, parameters, defaults, fields, enum and literal values, base classes of exceptions and
the command tree, but no documentation text. `compare.py` measures another package against the output.

Works with Python 3.9 and newer, and needs only the inspected package.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import io
import json
import pkgutil
import re
import sys
import textwrap
import types as pytypes
import typing
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

SCHEMA = 1

# Modules whose exports are part of the surface, relative to the package.
SURFACE_MODULES = ("", "types", "auth")

# Public classes that are imported by path and are in no __all__ of SURFACE_MODULES.
EXTRA_NAMES = (
    "lib.retry_handler:RetryConfig",
    "lib.public_interfaces:AwaitableConcurrentFuture",
)

# Dunder methods that change how an object may be used.
USED_DUNDERS = frozenset(
    [
        "__enter__",
        "__exit__",
        "__aenter__",
        "__aexit__",
        "__await__",
        "__aiter__",
        "__anext__",
        "__iter__",
        "__next__",
        "__len__",
        "__getitem__",
        "__contains__",
        "__call__",
        "__reduce__",
    ]
)

# Methods of model classes that users call although the model library provides them.
MODEL_API = ("model_validate", "model_dump", "model_dump_json", "model_copy")

# Base classes whose members do not belong to the package.
FOREIGN_ROOTS = ("builtins", "abc", "typing", "typing_extensions", "enum", "pydantic", "httpx")

CLI_CANDIDATES = (
    "cli.__main__:main_cli",
    "cli:main_cli",
    "cli.main:main_cli",
    "cli:cli",
    "cli.__main__:cli",
)
PARSER_FACTORIES = ("build_parser", "make_parser", "create_parser", "get_parser")


class Normaliser:
    """Turns reprs and annotations into strings that do not name the package or a machine."""

    def __init__(self, package: str) -> None:
        self._package = re.compile(rf"\b{re.escape(package)}\.(?:[a-z_0-9]+\.)*")
        self._bare = re.compile(rf"\b{re.escape(package)}\b")

    def text(self, value: str) -> str:
        value = re.sub(r" at 0x[0-9a-fA-F]+", "", value)
        value = re.sub(r"\b(?:typing|typing_extensions|collections\.abc|builtins)\.", "", value)
        value = self._package.sub("", value)
        value = self._bare.sub("PKG", value)
        value = value.replace("NoneType", "None")
        return re.sub(r"\s+", " ", value).strip()

    def annotation(self, value: Any) -> str | None:
        if value is inspect.Signature.empty:
            return None
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, typing.ForwardRef):
            return self.text(value.__forward_arg__)
        if isinstance(value, type) and not typing.get_args(value):
            return self.text(value.__qualname__)
        return self.text(re.sub(r"ForwardRef\('([^']*)'(?:, [^)]*)?\)", r"\1", repr(value)))

    def default(self, value: Any) -> str:
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, type):
            return value.__name__
        if isinstance(
            value, (pytypes.FunctionType, pytypes.BuiltinFunctionType, functools.partial)
        ):
            return f"<callable {getattr(value, '__name__', 'partial')}>"
        if isinstance(value, float) and value.is_integer():
            return repr(int(value))  # 1 and 1.0 are the same default
        return self.text(repr(value))


def describe_signature(func: Any, norm: Normaliser, *, drop_first: bool) -> dict[str, Any] | None:
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return None
    params = list(signature.parameters.values())
    if (
        drop_first
        and params
        and params[0].kind
        in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
    ):
        params = params[1:]
    described = []
    for p in params:
        entry: dict[str, Any] = {"name": p.name, "kind": p.kind.name.lower()}
        if p.default is not inspect.Parameter.empty:
            entry["default"] = norm.default(p.default)
        annotation = norm.annotation(p.annotation)
        if annotation is not None:
            entry["annotation"] = annotation
        described.append(entry)
    return {
        "text": render_signature(described),
        "params": described,
        "returns": norm.annotation(signature.return_annotation),
    }


def render_signature(params: list[dict[str, Any]]) -> str:
    parts: list[str] = []
    starred = False
    for i, p in enumerate(params):
        kind, name = p["kind"], p["name"]
        if kind == "var_positional":
            parts.append(f"*{name}")
            starred = True
            continue
        if kind == "var_keyword":
            parts.append(f"**{name}")
            continue
        if kind == "keyword_only" and not starred:
            parts.append("*")
            starred = True
        parts.append(f"{name}={p['default']}" if "default" in p else name)
        if kind == "positional_only" and (
            i + 1 == len(params) or params[i + 1]["kind"] != "positional_only"
        ):
            parts.append("/")
    return f"({', '.join(parts)})"


def is_own(cls: type) -> bool:
    return cls.__module__.split(".")[0] not in FOREIGN_ROOTS


def describe_member(owner: type, name: str, norm: Normaliser) -> dict[str, Any] | None:
    raw = inspect.getattr_static(owner, name)
    if isinstance(raw, property):
        return {"kind": "property", "returns": norm.annotation(_return_of(raw.fget))}
    if isinstance(raw, functools.cached_property):
        return {"kind": "property", "returns": norm.annotation(_return_of(raw.func))}
    binding, func = "method", raw
    if isinstance(raw, staticmethod):
        binding, func = "staticmethod", raw.__func__
    elif isinstance(raw, classmethod):
        binding, func = "classmethod", raw.__func__
    if not callable(func):
        if isinstance(raw, (str, int, float, bool, type(None), tuple, frozenset)):
            return {"kind": "class_attribute", "value": norm.default(raw)}
        return None
    if isinstance(func, type):
        return None
    entry: dict[str, Any] = {
        "kind": binding,
        "async": inspect.iscoroutinefunction(inspect.unwrap(func)),
        "signature": describe_signature(func, norm, drop_first=binding != "staticmethod"),
    }
    if getattr(func, "__deprecated__", None):
        entry["warns_on_call"] = True
    return entry


def _return_of(func: Any) -> Any:
    return getattr(func, "__annotations__", {}).get("return", inspect.Signature.empty)


def assigned_attributes(cls: type) -> set[str]:
    """Public ``self.x`` targets of the class's own ``__init__`` chain (best effort)."""
    found: set[str] = set()
    for klass in cls.__mro__:
        if not is_own(klass):
            continue
        found.update(n for n in getattr(klass, "__annotations__", {}) if not n.startswith("_"))
        init = klass.__dict__.get("__init__")
        if init is None:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else ([node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else [])
            )
            for target in targets:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                    and not target.attr.startswith("_")
                ):
                    found.add(target.attr)
    return found


def pydantic_fields(cls: type, norm: Normaliser) -> dict[str, Any]:
    out = {}
    for name, info in cls.model_fields.items():  # type: ignore[attr-defined]
        entry: dict[str, Any] = {
            "required": bool(info.is_required()),
            "annotation": norm.annotation(info.annotation),
        }
        if not info.is_required():
            if info.default_factory is not None:
                try:
                    entry["default"] = norm.default(info.default_factory())  # type: ignore[call-arg]
                except TypeError:
                    entry["default"] = "<factory>"
            else:
                entry["default"] = norm.default(info.default)
        aliases = sorted(
            {a for a in (info.alias, info.serialization_alias) if isinstance(a, str)}
            | set(_validation_aliases(info.validation_alias))
        )
        if aliases:
            entry["aliases"] = aliases
        constraints = {}
        for meta in info.metadata:
            for attr in (
                "ge",
                "gt",
                "le",
                "lt",
                "min_length",
                "max_length",
                "multiple_of",
                "pattern",
            ):
                bound = getattr(meta, attr, None)
                if bound is not None:
                    constraints[attr] = bound
        if constraints:
            entry["constraints"] = constraints
        out[name] = entry
    return out


def _validation_aliases(alias: Any) -> list[str]:
    if alias is None:
        return []
    if isinstance(alias, str):
        return [alias]
    return [c for c in getattr(alias, "choices", []) if isinstance(c, str)]


def dataclass_fields(cls: type, norm: Normaliser) -> dict[str, Any]:
    out = {}
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        entry: dict[str, Any] = {"annotation": norm.annotation(field.type), "init": field.init}
        if field.default is not dataclasses.MISSING:
            entry["required"] = False
            entry["default"] = norm.default(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            entry["required"] = False
            entry["default"] = norm.default(field.default_factory())
        else:
            entry["required"] = True
        if getattr(field, "kw_only", False):
            entry["kw_only"] = True
        out[field.name] = entry
    return out


def msgspec_fields(cls: type, norm: Normaliser) -> dict[str, Any]:
    import msgspec

    out = {}
    for field in msgspec.structs.fields(cls):
        entry: dict[str, Any] = {
            "required": field.required,
            "annotation": norm.annotation(field.type),
        }
        if field.default is not msgspec.NODEFAULT:
            entry["default"] = norm.default(field.default)
        elif field.default_factory is not msgspec.NODEFAULT:
            entry["default"] = norm.default(field.default_factory())
        if field.encode_name != field.name:
            entry["aliases"] = [field.encode_name]
        out[field.name] = entry
    return out


def attrs_fields(cls: type, norm: Normaliser) -> dict[str, Any]:
    import attr

    out = {}
    for field in cls.__attrs_attrs__:  # type: ignore[attr-defined]
        if field.name.startswith("_"):
            continue
        entry: dict[str, Any] = {
            "required": field.default is attr.NOTHING,
            "annotation": norm.annotation(field.type),
        }
        if isinstance(field.default, attr.Factory):  # type: ignore[arg-type]
            entry["default"] = norm.default(field.default.factory())
        elif field.default is not attr.NOTHING:
            entry["default"] = norm.default(field.default)
        if field.kw_only:
            entry["kw_only"] = True
        out[field.name] = entry
    return out


def describe_class(cls: type, norm: Normaliser) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "kind": "class",
        "mro": [c.__name__ for c in cls.__mro__ if c is not object],
    }
    if issubclass(cls, enum.Enum):
        entry["flavour"] = "enum"
        entry["values"] = {m.name: norm.default(m.value) for m in cls}
        return entry

    is_pydantic = hasattr(cls, "model_fields") and hasattr(cls, "model_validate")
    is_typed_dict = hasattr(cls, "__required_keys__")
    if is_typed_dict:
        entry["flavour"] = "typeddict"
        entry["fields"] = {
            name: {"required": name in cls.__required_keys__, "annotation": norm.annotation(ann)}
            for name, ann in cls.__annotations__.items()
        }
        return entry
    if is_pydantic:
        entry["flavour"] = "pydantic"
        entry["fields"] = pydantic_fields(cls, norm)
        config = cls.model_config  # type: ignore[attr-defined]
        entry["config"] = {
            "extra": str(config.get("extra") or "ignore"),
            "frozen": bool(config.get("frozen", False)),
        }
    elif hasattr(cls, "__struct_fields__"):
        entry["flavour"] = "msgspec"
        entry["fields"] = msgspec_fields(cls, norm)
        struct = cls.__struct_config__  # type: ignore[attr-defined]
        entry["config"] = {
            "extra": "forbid" if struct.forbid_unknown_fields else "ignore",
            "frozen": bool(struct.frozen),
        }
    elif hasattr(cls, "__attrs_attrs__"):
        entry["flavour"] = "attrs"
        entry["fields"] = attrs_fields(cls, norm)
    elif dataclasses.is_dataclass(cls):
        entry["flavour"] = "dataclass"
        entry["fields"] = dataclass_fields(cls, norm)
        entry["config"] = {"frozen": bool(cls.__dataclass_params__.frozen)}  # type: ignore[attr-defined]
    elif issubclass(cls, Warning):
        entry["flavour"] = "warning"
    elif issubclass(cls, BaseException):
        entry["flavour"] = "exception"
    else:
        entry["flavour"] = "plain"

    model_api = [name for name in MODEL_API if callable(getattr(cls, name, None))]
    if model_api:
        entry["model_api"] = model_api

    if not is_pydantic:
        init = next(
            (k.__dict__["__init__"] for k in cls.__mro__ if "__init__" in k.__dict__ and is_own(k)),
            None,
        )
        if init is not None and not getattr(cls, "_is_protocol", False):
            entry["init"] = describe_signature(init, norm, drop_first=True)

    fields = set(entry.get("fields", ()))
    members: dict[str, Any] = {}
    for klass in reversed([k for k in cls.__mro__ if is_own(k) and k is not object]):
        for name in klass.__dict__:
            if name in fields or (name.startswith("_") and name not in USED_DUNDERS):
                continue
            if name == "model_config":
                continue
            described = describe_member(cls, name, norm)
            if described is not None:
                members[name] = described
    entry["members"] = dict(sorted(members.items()))
    attributes = sorted(assigned_attributes(cls) - fields - set(members))
    if attributes and not is_pydantic:
        entry["attributes"] = attributes
    return entry


def literal_values(value: Any) -> list[Any] | None:
    if typing.get_origin(value) is typing.Literal:
        return list(typing.get_args(value))
    try:
        import typing_extensions
    except ImportError:
        return None
    if typing.get_origin(value) is getattr(typing_extensions, "Literal", None):
        return list(typing.get_args(value))
    return None


def union_members(value: Any, norm: Normaliser) -> list[str] | None:
    inner = value
    while typing.get_origin(inner) is not None and hasattr(inner, "__metadata__"):
        inner = typing.get_args(inner)[0]
    if typing.get_origin(inner) in (typing.Union, getattr(pytypes, "UnionType", typing.Union)):
        out = []
        for arg in typing.get_args(inner):
            while hasattr(arg, "__metadata__"):
                arg = typing.get_args(arg)[0]
            out.append(norm.annotation(arg) or "?")
        return sorted(out)
    return None


def foreign_origin(cls: type) -> str | None:
    """The third-party package a re-exported class comes from.

    A package may rewrite ``__module__`` of what it re-exports, so the class is also looked up
    by identity in the packages it could come from.
    """
    for root in FOREIGN_ROOTS:
        module = sys.modules.get(root)
        if cls.__module__.split(".")[0] == root or getattr(module, cls.__name__, None) is cls:
            return root
    return None


def describe_object(value: Any, norm: Normaliser) -> dict[str, Any]:
    if isinstance(value, pytypes.ModuleType):
        return {"kind": "module", "exports": exported_names(value)[0]}
    if isinstance(value, type) and not typing.get_args(value):
        if value.__module__ == "builtins":
            return {"kind": "alias", "target": value.__name__}
        origin = foreign_origin(value)
        if origin is not None:
            return {"kind": "alias", "target": f"{origin}.{value.__name__}"}
        return describe_class(value, norm)
    values = literal_values(value)
    if values is not None:
        return {"kind": "literal", "values": values}
    union = union_members(value, norm)
    if union is not None:
        return {"kind": "union", "members": union}
    if typing.get_origin(value) is not None:
        return {"kind": "alias", "target": norm.annotation(value)}
    if callable(value):
        return {
            "kind": "function",
            "async": inspect.iscoroutinefunction(inspect.unwrap(value)),
            "signature": describe_signature(value, norm, drop_first=False),
        }
    return {"kind": "value", "type": type(value).__name__}


def exported_names(module: pytypes.ModuleType) -> tuple[list[str], bool]:
    """The module's ``__all__``, or its public non-module attributes when it has none."""
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return sorted(dict.fromkeys(declared)), True
    names = []
    for name in vars(module):
        value = getattr(module, name, None)
        if name.startswith("_") or isinstance(value, pytypes.ModuleType) or name == "annotations":
            continue
        names.append(name)
    return sorted(names), False


def describe_module(module: pytypes.ModuleType, norm: Normaliser) -> dict[str, Any]:
    names, declared = exported_names(module)
    described: dict[str, Any] = {}
    for name in names:
        if not hasattr(module, name):
            described[name] = {"kind": "unresolved"}
            continue
        try:
            described[name] = describe_object(getattr(module, name), norm)
        except Exception as exc:  # one odd object must not hide the rest of the surface
            described[name] = {"kind": "error", "error": type(exc).__name__}
    return {"declares_all": declared, "names": described}


def import_paths(
    package: pytypes.ModuleType, only: typing.Iterable[str] | None = None
) -> dict[str, list[str]]:
    """
    Public submodule paths (relative) and the names defined in or exported by each.

    With `only`, those of these that exist: the others of a large package are not imported.
    """
    out: dict[str, list[str]] = {}
    root = package.__name__
    if only is None:
        names = [info.name for info in pkgutil.walk_packages(package.__path__, root + ".")]
    else:
        names = [f"{root}.{path}" for path in only]
    for name in names:
        relative = name[len(root) + 1 :]
        parts = relative.split(".")
        if any(p.startswith(("_", "test_")) or p.endswith("_test") for p in parts):
            continue
        try:
            module = importlib.import_module(name)
        except Exception as error:  # if an optional dependency is missing, the path exists
            if not (isinstance(error, ModuleNotFoundError) and error.name == name):
                out[relative] = []
            continue
        declared = getattr(module, "__all__", None)
        if declared is None:
            declared = [
                n
                for n, v in vars(module).items()
                if not n.startswith("_")
                and getattr(v, "__module__", "").split(".")[0] == root
                and not isinstance(v, pytypes.ModuleType)
                and inspect.isroutine(v) | inspect.isclass(v)
            ]
        out[relative] = sorted(set(declared))
    return dict(sorted(out.items()))


# --------------------------------------------------------------------------- command line


def describe_click(command: Any, norm: Normaliser) -> dict[str, Any]:
    import click

    ctx = click.Context(command, info_name="x")
    arguments, options = [], {}
    for param in command.params:
        kind = param.type
        type_name = getattr(kind, "name", type(kind).__name__)
        if isinstance(param, click.Argument):
            arguments.append(
                {
                    "name": param.name,
                    "nargs": param.nargs,
                    "required": param.required,
                    "type": type_name,
                }
            )
            continue
        long = max(param.opts, key=len)
        entry: dict[str, Any] = {
            "short": sorted(o for o in param.opts if o != long),
            "type": "flag" if param.is_flag else type_name,
            "multiple": param.multiple,
            "required": param.required,
        }
        default = param.default
        if (
            not (param.is_flag or param.multiple)
            and default is not None
            and "UNSET" not in repr(default).upper()
        ):
            entry["default"] = norm.default(default)
        if isinstance(kind, click.Choice):
            entry["choices"] = [str(c) for c in kind.choices]
        options[long] = entry
    out: dict[str, Any] = {"arguments": arguments, "options": dict(sorted(options.items()))}
    if hasattr(command, "list_commands"):
        out["commands"] = {
            name: describe_click(command.get_command(ctx, name), norm)
            for name in sorted(command.list_commands(ctx))
        }
    return out


def describe_argparse(parser: argparse.ArgumentParser, norm: Normaliser) -> dict[str, Any]:
    arguments, options, commands = [], {}, {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                commands[name] = describe_argparse(sub, norm)
            continue
        if isinstance(action, (argparse._HelpAction, argparse._VersionAction)):
            continue
        type_name = getattr(action.type, "__name__", "text")
        type_name = {"str": "text", "int": "integer"}.get(type_name, type_name)
        if not action.option_strings:
            nargs = {"*": -1, "+": -1, "?": 1, None: 1}.get(action.nargs, action.nargs)
            arguments.append(
                {
                    "name": action.dest,
                    "nargs": nargs,
                    "required": action.nargs not in ("*", "?"),
                    "type": type_name,
                }
            )
            continue
        long = max(action.option_strings, key=len)
        flag = action.nargs == 0
        entry: dict[str, Any] = {
            "short": sorted(o for o in action.option_strings if o != long),
            "type": "flag" if flag else ("choice" if action.choices else type_name),
            "multiple": isinstance(action, argparse._AppendAction),
            "required": action.required,
        }
        if not flag and action.default not in (None, argparse.SUPPRESS):
            entry["default"] = norm.default(action.default)
        if action.choices:
            entry["choices"] = [str(c) for c in action.choices]
        options[long] = entry
    out: dict[str, Any] = {"arguments": arguments, "options": dict(sorted(options.items()))}
    if commands:
        out["commands"] = dict(sorted(commands.items()))
    return out


def describe_cli(package: str, explicit: str | None, norm: Normaliser) -> dict[str, Any] | None:
    candidates = [explicit] if explicit else [f"{package}.{c}" for c in CLI_CANDIDATES]
    for candidate in candidates:
        module_name, _, attr = candidate.partition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception:
            continue
        target = getattr(module, attr or "cli", None)
        try:
            import click

            if isinstance(target, click.Command):
                return describe_click(target, norm)
        except ImportError:
            pass
        for factory in PARSER_FACTORIES:
            build = getattr(module, factory, None)
            if callable(build):
                parser = build()
                if isinstance(parser, argparse.ArgumentParser):
                    return describe_argparse(parser, norm)
        if isinstance(target, argparse.ArgumentParser):
            return describe_argparse(target, norm)
    return None


# --------------------------------------------------------------------------- entry points


def extract(
    package: str,
    *,
    cli: str | None = None,
    with_cli: bool = True,
    only: typing.Iterable[str] | None = None,
) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    norm = Normaliser(package)
    root = importlib.import_module(package)
    modules: dict[str, Any] = {}
    for relative in SURFACE_MODULES:
        name = f"{package}.{relative}" if relative else package
        try:
            modules[relative or "."] = describe_module(importlib.import_module(name), norm)
        except Exception:  # an absent or broken submodule has no surface
            continue
    extra: dict[str, Any] = {}
    for path in EXTRA_NAMES:
        module_name, _, attr = path.partition(":")
        try:
            value = getattr(importlib.import_module(f"{package}.{module_name}"), attr)
        except Exception:
            continue
        extra[path] = describe_object(value, norm)
    stdlib = getattr(sys, "stdlib_module_names", frozenset())
    surface = {
        "schema": SCHEMA,
        "package": package,
        "version": str(getattr(root, "__version__", "unknown")),
        # What the whole public surface pulls in once imported.
        "loaded_packages": sorted(
            {n.split(".")[0] for n in sys.modules}
            - stdlib
            - {"__main__", "__mp_main__"}
            - {n.split(".")[0] for n in sys.modules if n.startswith("_")}
        ),
        "modules": modules,
        "extra": extra,
        "import_paths": import_paths(root, only),
        "cli": describe_cli(package, cli, norm) if with_cli else None,
    }
    surface["counts"] = count(surface)
    return surface


def count(surface: dict[str, Any]) -> dict[str, int]:
    names = [(m, n, d) for m, mod in surface["modules"].items() for n, d in mod["names"].items()]
    unique = {n: d for _, n, d in names}  # a name the root re-exports from .types counts once
    classes = {n: d for n, d in unique.items() if d["kind"] == "class"}

    def commands(node: dict[str, Any] | None) -> tuple[int, int]:
        if not node:
            return 0, 0
        leaves = 0 if node.get("commands") else 1
        opts = len(node["options"]) + len(node["arguments"])
        for child in node.get("commands", {}).values():
            a, b = commands(child)
            leaves, opts = leaves + a, opts + b
        return leaves, opts

    leaves, opts = commands(surface["cli"])
    methods = [
        m
        for d in classes.values()
        for m in d.get("members", {}).values()
        if m["kind"] in ("method", "classmethod", "staticmethod")
    ]
    return {
        "root_exports": len(surface["modules"].get(".", {"names": {}})["names"]),
        "types_exports": len(surface["modules"].get("types", {"names": {}})["names"]),
        "unique_names": len(unique),
        "classes": len(classes),
        "pydantic_models": sum(d.get("flavour") == "pydantic" for d in classes.values()),
        "dataclasses": sum(d.get("flavour") == "dataclass" for d in classes.values()),
        "exceptions": sum(d.get("flavour") == "exception" for d in classes.values()),
        "literals_unions_aliases": sum(
            d["kind"] in ("literal", "union", "alias") for d in unique.values()
        ),
        "fields": sum(len(d.get("fields", ())) for d in classes.values()),
        "methods": len(methods),
        "async_methods": sum(bool(m.get("async")) for m in methods),
        "parameters": sum(len((m.get("signature") or {"params": ()})["params"]) for m in methods),
        "cli_commands": leaves,
        "cli_parameters": opts,
        "import_paths": len(surface["import_paths"]),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package")
    parser.add_argument("--cli", help="MODULE:ATTR of the click group or argparse parser")
    parser.add_argument("--no-cli", action="store_true")
    parser.add_argument("--paths", help="a JSON list: only these paths of submodules are imported")
    parser.add_argument("--indent", type=int, default=1)
    args = parser.parse_args(argv)
    noise = io.StringIO()
    try:
        with redirect_stdout(noise), redirect_stderr(noise):
            only = json.loads(args.paths) if args.paths else None
            surface = extract(args.package, cli=args.cli, with_cli=not args.no_cli, only=only)
    except Exception as exc:
        print(f"cannot import {args.package}: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 3
    json.dump(surface, sys.stdout, indent=args.indent, sort_keys=False, default=str)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
