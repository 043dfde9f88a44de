"""The experts of a rank: a part of the width of each expert, cut when it is read.

Files have a matrix for each projection of each expert, or one tensor for all experts of a layer, as
plain numbers or in MXFP4. A model has one tensor for all: with gate before up or both in turns, and
transposed or not. A rank's tensors are filled as their files are read, so there is no second copy.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations import mxfp4

from tinkex.engine.model import model_experts
from tinkex.engine.model.unsupported import UnsupportedModel
from tinkex.engine.ranks.process_group import own_range
from tinkex.engine.ranks.shard import Division
from tinkex.models.weight_file_checks import RefusedFolder

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
_PART = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up"}


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
        f"{name}.{part}": Division(letter, form.inner)
        for part, letter in letters.items()
        if form.gated or part != "w3"
    }


class ExpertReader:
    """Reads one rank's part of all experts, from files in any order."""

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
        #: What was read, by names that transformers knows.
        self.found: dict[str, Tensor] = {}
        #: Matrices of single experts that are still to be read.
        self._awaited: dict[str, set[tuple[int, str]]] = {}
        #: Blocks without scales, and scales without blocks, which may be in another file.
        self._halves: dict[str, dict[str, Tensor]] = {}

    def read(self, opened: Any, key: str) -> bool:
        """
        Reads a tensor of a file; False if it is not of experts.

        Raises `RefusedFolder` if it has other sizes than the config says.
        """
        layer = layer_of(key)
        form = None if layer is None else self._forms.get(layer)
        if form is None:
            return False
        if (one := _OF_ONE.match(key)) is not None:
            self._read_one(opened.get_slice(key), key, form, one[1], int(one[2]), one[3])
            return True
        every = _OF_ALL.search(key)
        if every is None:
            return False
        name = every[1] or {"input_linear": form.first, "output_linear": "down_proj"}[every[3]]
        if every[2] in ("_blocks", "_scales"):
            self._read_quantized(opened.get_slice(key), key, form, name, every[2])
        else:
            self._read_all(opened.get_slice(key), key, form, name + (every[2] or ""))
        return True

    @property
    def incomplete(self) -> list[str]:
        """Tensors of which matrices were in no file."""
        return [name for name, awaited in self._awaited.items() if awaited]

    def _range(self, form: ExpertForm) -> tuple[int, int]:
        return own_range(form.inner, self._rank, self._ranks)

    def _read_one(
        self, whole: Any, key: str, form: ExpertForm, prefix: str, number: int, leaf: str
    ) -> None:
        start, stop = self._range(form)
        own = stop - start
        part = _PART.get(leaf, "down")
        down = part == "down"
        sizes = (form.hidden, form.inner) if down else (form.inner, form.hidden)
        _check_sizes(whole, key, sizes)
        name = "down_proj" if down else form.first
        target = f"{prefix}.{name}"
        if target not in self.found:
            shape = form.shapes(own)[name]
            self.found[target] = torch.empty(shape, dtype=self._dtype, device=self._device)
            parts = ["down"] if down else ["gate", "up"] if form.gated else ["up"]
            self._awaited[target] = {*itertools.product(range(form.experts), parts)}
        if (number, part) not in self._awaited[target]:
            raise RefusedFolder(
                f"the weights have {key}, which a layer of {form.experts} experts does not have, or "
                "have it twice. Download the model again."
            )
        self._awaited[target].remove((number, part))
        matrix = self.found[target][number]  # [outputs, inputs]
        if form.transposed:
            matrix = matrix.mT
        if not down and form.gated:
            second = part == "up"
            if form.concatenated:
                matrix = matrix[own:] if second else matrix[:own]
            else:
                matrix = matrix[int(second) :: 2]
        matrix.copy_(whole[:, start:stop] if down else whole[start:stop])

    def _read_all(self, whole: Any, key: str, form: ExpertForm, name: str) -> None:
        _check_sizes(whole, key, form.shapes(form.inner).get(name))
        start, stop = self._range(form)
        if name == "down_proj_bias":
            tensor = whole[:]  # one rank adds it
        elif name == "down_proj":
            tensor = _cut(whole, 1 if form.transposed else 2, [(start, stop)])
        else:
            dim = 2 if form.transposed and not name.endswith("_bias") else 1
            tensor = _cut(whole, dim, form.first_ranges(start, stop))
        self.found[key] = tensor.to(self._dtype)

    def _read_quantized(self, whole: Any, key: str, form: ExpertForm, name: str, kind: str) -> None:
        start, stop = self._range(form)
        outputs, inputs = form.shapes(form.inner)[name][1:]
        if form.transposed:
            outputs, inputs = inputs, outputs
        sizes = (form.experts, outputs, inputs // GROUP)
        _check_sizes(whole, key, (*sizes, GROUP // 2) if kind == "_blocks" else sizes)
        down = name == "down_proj"
        # A part of the inputs may begin and end within a group.
        groups = (start // GROUP, -(-stop // GROUP))
        cut = _cut(whole, 2, [groups]) if down else _cut(whole, 1, form.first_ranges(start, stop))
        target = key.removesuffix(kind)
        halves = self._halves.setdefault(target, {})
        halves[kind] = cut
        if len(halves) < 2:
            return
        del self._halves[target]
        stack = torch.empty(form.shapes(stop - start)[name], dtype=self._dtype, device=self._device)
        offset = groups[0] * GROUP
        for own, blocks, scales in zip(stack, halves["_blocks"], halves["_scales"], strict=True):
            # transformers computes them as they are in the model, [inputs, outputs].
            (matrix,) = mxfp4.convert_moe_packed_tensors(blocks[None], scales[None])
            if down:
                matrix = matrix[start - offset : stop - offset]
            (own if form.transposed else own.mT).copy_(matrix)
        self.found[target] = stack


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
