"""The experts of a rank: a part of the width of each expert, cut when it is read.

Files have a matrix for each projection of each expert, or one tensor for all experts of a layer, as
plain numbers or in MXFP4. A model has one tensor for all: with gate before up or both in turns, and
transposed or not. A rank makes its part of that tensor while it is read, so there is no second copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations import mxfp4

from tinkex.engine.model import model_experts
from tinkex.engine.model.unsupported import UnsupportedModel
from tinkex.engine.ranks.process_group import own_range
from tinkex.engine.ranks.shard import Division
from tinkex.models.weight_file_checks import RefusedFolder, check_complete

#: Numbers of MXFP4 that have one scale.
GROUP = 32

Shape = tuple[int, ...]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
#: One projection of one expert.
_OF_ONE = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
#: One of all experts; Granite has them beside the router.
_OF_ALL = re.compile(
    r"\.(?:experts\.(gate_up_proj|up_proj|down_proj)(_bias|_blocks|_scales)?(?:\.weight)?"
    r"|block_sparse_moe\.(input_linear|output_linear)\.weight)$"
)
_PARTS = dict.fromkeys(("gate_proj", "w1"), "gate")
_PARTS |= dict.fromkeys(("up_proj", "w3"), "up") | dict.fromkeys(("down_proj", "w2"), "down")


class ExpertForm(NamedTuple):
    """How a model has the experts of one layer. The sizes are those of the whole model."""

    experts: int
    hidden: int
    inner: int
    gated: bool
    #: Gate before up; otherwise both in turns.
    concatenated: bool
    transposed: bool
    biased: bool

    @classmethod
    def of(cls, module: Any) -> ExpertForm:
        """Of a module of transformers that is not divided yet."""
        experts, *sizes = module.down_proj.shape
        inner, hidden = sizes if module.is_transposed else reversed(sizes)
        return cls(
            experts=experts,
            hidden=hidden,
            inner=inner,
            gated=module.has_gate,
            concatenated=module.is_concatenated,
            transposed=module.is_transposed,
            biased=module.has_bias,
        )

    @property
    def first(self) -> str:
        """The name of what comes before the activation."""
        return "gate_up_proj" if self.gated else "up_proj"

    def shapes(self, inner: int) -> dict[str, Shape]:
        """Of a module's tensors, if its experts have this width."""
        outputs = 2 * inner if self.gated else inner
        matrices = {self.first: (outputs, self.hidden), "down_proj": (self.hidden, inner)}
        found: dict[str, Shape] = {
            name: (self.experts, *(reversed(sizes) if self.transposed else sizes))
            for name, sizes in matrices.items()
        }
        if self.biased:
            found |= {
                f"{self.first}_bias": (self.experts, outputs),
                "down_proj_bias": (self.experts, self.hidden),
            }
        return found

    def first_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Which outputs of the first projection belong to a part of the width."""
        if not self.gated:
            return [(start, stop)]
        if not self.concatenated:
            return [(2 * start, 2 * stop)]
        return [(start, stop), (self.inner + start, self.inner + stop)]

    @property
    def first_parts(self) -> list[str]:
        return ["gate", "up"] if self.gated else ["up"]

    def rows(self, part: str, own: int) -> slice:
        """Where the outputs of a part of the first projection are, if experts have this width."""
        at = self.first_parts.index(part)
        if self.concatenated:
            return slice(at * own, (at + 1) * own)
        return slice(at, None, len(self.first_parts))

    def quantized_shapes(self, name: str) -> dict[str, Shape]:
        """Of the two tensors in MXFP4 for one of the model."""
        if name not in self.shapes(self.inner):
            return {}
        _, outputs, inputs = self.shapes(self.inner)[name]
        if self.transposed:
            outputs, inputs = inputs, outputs
        scales = (self.experts, outputs, inputs // GROUP)
        return {"_blocks": (*scales, GROUP // 2), "_scales": scales}


def layer_of(name: str) -> int | None:
    """The number of the layer in the name of a module or tensor."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def forms_of(model: Any) -> dict[int, ExpertForm]:
    """The experts of a model that is not divided yet, by layer."""
    return {
        layer: ExpertForm.of(module)
        for name, module in model_experts.experts_modules(model).items()
        if (layer := layer_of(name)) is not None
    }


def divide_experts(module: Any, name: str, ranks: int) -> dict[str, Division]:
    """Gives a module without weights the sizes of one rank. Raises `UnsupportedModel`."""
    form = ExpertForm.of(module)
    if form.inner % ranks:
        raise UnsupportedModel(
            f"the experts at {name} have a width of {form.inner}, which {ranks} GPUs cannot divide. "
            "Use another --gpus-per-replica."
        )
    for key, shape in form.shapes(form.inner // ranks).items():
        setattr(module, key, nn.Parameter(getattr(module, key).new_empty(shape)))
    letters: dict[str, Literal["A", "B"]] = {"w1": "B", "w3": "B", "w2": "A"}
    return {
        f"{name}.{part}": Division.of(letter, form.inner)
        for part, letter in letters.items()
        if form.gated or part != "w3"
    }


class Part:
    """
    A tensor of one rank, read when transformers asks for it, as with the files that it opens itself.

    So it comes into the memory that transformers has reserved on the device, and into no other.
    """

    def __init__(self, read: Callable[..., Tensor], *args: Any) -> None:
        self._read, self._args = read, args

    def __getitem__(self, index: Any) -> Tensor:
        return self._read(*self._args)[index]


class ExpertReader:
    """Finds the experts in files, in any order, and makes one rank's part of them."""

    def __init__(
        self,
        forms: Mapping[int, ExpertForm],
        *,
        rank: int,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forms, self._rank, self._ranks = forms, rank, ranks
        self._dtype, self._device = dtype, device
        self._parts: dict[str, Part] = {}
        #: Matrices of single experts, by the tensor that they belong to.
        self._single: dict[str, tuple[ExpertForm, dict[tuple[int, str], Any]]] = {}
        #: Blocks and scales, which may be in two files.
        self._quantized: dict[str, tuple[ExpertForm, dict[str, Any]]] = {}

    def add(self, whole: Any, key: str) -> bool:
        """
        Notes a tensor that is `whole` in its file; False if it is not of experts.

        Raises `RefusedFolder` if it has other sizes than the config says.
        """
        layer = layer_of(key)
        form = None if layer is None else self._forms.get(layer)
        if form is None:
            return False
        if (one := _OF_ONE.match(key)) is not None:
            self._add_single(whole, key, form, one[1], int(one[2]), one[3])
            return True
        every = _OF_ALL.search(key)
        if every is None:
            return False
        kind = every[2] or ""
        name = every[1] or {"input_linear": form.first, "output_linear": "down_proj"}[every[3]]
        if kind in ("_blocks", "_scales"):
            _check_sizes(whole, key, form.quantized_shapes(name).get(kind))
            target = key.removesuffix(kind)
            self._quantized.setdefault(target, (form, {}))[1][kind] = whole
        else:
            _check_sizes(whole, key, form.shapes(form.inner).get(name + kind))
            self._parts[key] = Part(self._read_all, whole, form, name + kind)
        return True

    def _add_single(
        self, whole: Any, key: str, form: ExpertForm, prefix: str, number: int, leaf: str
    ) -> None:
        part = _PARTS[leaf]
        down = part == "down"
        _check_sizes(whole, key, (form.hidden, form.inner) if down else (form.inner, form.hidden))
        if number >= form.experts or part not in ("down", *form.first_parts):
            raise RefusedFolder(
                f"the weights have {key}, which a model of {form.experts} experts with "
                f"{form.first} does not have. Download the model again, or correct config.json."
            )
        target = f"{prefix}.{'down_proj' if down else form.first}"
        self._single.setdefault(target, (form, {}))[1][number, part] = whole

    def parts(self, folder: Path) -> dict[str, Part]:
        """By names that transformers knows. Raises `RefusedFolder` if an expert is missing."""
        missing = []
        for target, (form, matrices) in self._single.items():
            of_each = ["down"] if (0, "down") in matrices else form.first_parts
            if len(matrices) < form.experts * len(of_each):
                missing.append(target)
            self._parts[target] = Part(self._read_single, form, matrices)
        check_complete(missing, folder)
        for target, (form, halves) in self._quantized.items():
            if len(halves) == 2:  # transformers misses the others
                self._parts[target] = Part(self._read_quantized, form, target, halves)
        return self._parts

    def _range(self, form: ExpertForm) -> tuple[int, int]:
        return own_range(form.inner, self._rank, self._ranks)

    def _empty(self, form: ExpertForm, name: str) -> Tensor:
        start, stop = self._range(form)
        shape = form.shapes(stop - start)[name]
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _read_single(self, form: ExpertForm, matrices: Mapping[tuple[int, str], Any]) -> Tensor:
        start, stop = self._range(form)
        down = (0, "down") in matrices
        stack = self._empty(form, "down_proj" if down else form.first)
        by_expert = stack.mT if form.transposed else stack  # [outputs, inputs] of each
        for (number, part), whole in matrices.items():
            if down:
                by_expert[number].copy_(whole[:, start:stop])
            else:
                rows = form.rows(part, stop - start)
                by_expert[number][rows].copy_(whole[start:stop])
        return stack

    def _read_all(self, whole: Any, form: ExpertForm, name: str) -> Tensor:
        start, stop = self._range(form)
        if name == "down_proj_bias":
            tensor: Tensor = whole[:]  # one rank adds it
            return tensor
        if name == "down_proj":
            return _cut(whole, 1 if form.transposed else 2, [(start, stop)])
        dim = 2 if form.transposed and not name.endswith("_bias") else 1
        return _cut(whole, dim, form.first_ranges(start, stop))

    def _read_quantized(self, form: ExpertForm, target: str, halves: Mapping[str, Any]) -> Tensor:
        start, stop = self._range(form)
        down = target.endswith("down_proj")
        # A part of the inputs may begin and end within a group.
        first = start // GROUP
        ranges = [(first, -(-stop // GROUP))] if down else form.first_ranges(start, stop)
        cut = (_cut(halves[kind], 2 if down else 1, ranges) for kind in ("_blocks", "_scales"))
        blocks, scales = (each.to(self._device) for each in cut)
        stack = self._empty(form, "down_proj" if down else form.first)
        by_expert = stack if form.transposed else stack.mT  # [inputs, outputs] of each
        for number, own in enumerate(by_expert):
            each = slice(number, number + 1)
            (matrix,) = mxfp4.convert_moe_packed_tensors(blocks[each], scales[each])
            own.copy_(matrix[start - first * GROUP :][: stop - start] if down else matrix)
        return stack


def _check_sizes(whole: Any, key: str, expected: Shape | None) -> None:
    found = tuple(whole.get_shape())
    if found != expected:
        needed = "no such tensor" if expected is None else list(expected)
        raise RefusedFolder(
            f"{key} has the sizes {list(found)}, and the model needs {needed}. Download the model "
            "again, or save it with transformers' save_pretrained(folder)."
        )


def _cut(whole: Any, dim: int, ranges: list[tuple[int, int]]) -> Tensor:
    """A part of a tensor in a file, along one dimension."""
    parts: list[Tensor] = [whole[(slice(None),) * dim + (slice(*each),)] for each in ranges]
    # A part may be a view of the whole tensor.
    return torch.cat(parts, dim=dim)
