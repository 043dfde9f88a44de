"""Kernels that start before the kernel before them has ended (programmatic dependent launch).

A kernel with EARLY may start while the one before it runs. Until `wait_for_inputs` it reads only
what no kernel of the step writes (weights, adapters, and the fields of the rows, which the last
kernel of a step changes), and it writes nothing. Every kernel waits, so the end of a kernel is
the end of all before it. The first kernel of a step does not start early.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Up to this many rows a step has its own matrix products, which are faster than those of torch,
#: and all its kernels are in one stream.
FEW_ROWS = 16


def starts_early(rows: int, device: torch.device) -> bool:
    """Whether the kernels of a step start before the ones before them have ended."""
    if rows > FEW_ROWS or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(early: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if early else {}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        # Not before: a kernel that waits takes room from the one that computes.
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Brings the 128 bytes at each pointer to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
