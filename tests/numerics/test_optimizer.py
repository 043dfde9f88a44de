"""AdamW against that of torch in float64, with the same gradients."""

import math
from collections.abc import Callable

import pytest
import torch

from tinkex.engine.adapters.adapters import TrainingAdapter
from tinkex.engine.model.targets import Target
from tinkex.engine.training import optimizer
from tinkex.engine.training.optimizer import optimizer_step
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import AdamParams, DimuonParams, LoraConfig

STEPS = 20


def adapter(dtype: torch.dtype = torch.float32) -> TrainingAdapter:
    targets = [
        Target(name=f"layer{i}", kind="mlp", inputs=24, outputs=16, group=f"layer{i}")
        for i in range(3)
    ]
    made = TrainingAdapter(
        lora=LoraConfig(rank=4),
        targets=targets,
        seed=1,
        model_dtype=dtype,
        device=torch.device("cpu"),
    )
    made.master.normal_(generator=torch.Generator().manual_seed(9))
    made.refresh_live()
    return made


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(),
        AdamParams(learning_rate=1e-2, weight_decay=0.1),
        AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.999, eps=1e-8, grad_clip_norm=2.0),
        AdamParams(learning_rate=1e-3, grad_clip_norm=1e6),
        AdamParams(learning_rate=1e-3, beta1=0.0, beta2=0.0, eps=1e-3),
    ],
    ids=["defaults", "decay", "clipped", "clip never met", "no memory"],
)
def test_steps_equal_torch_adamw_in_float64(params: AdamParams) -> None:
    ours = adapter()
    leaf = ours.master.double().clone().requires_grad_()
    theirs = torch.optim.AdamW(
        [leaf],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    generator = torch.Generator().manual_seed(4)
    for step in range(STEPS):
        # Magnitudes from tiny to large, as gradients of sums have.
        gradient = torch.randn(ours.grad.shape, generator=generator) * 10.0 ** (step % 7 - 4)
        ours.grad.copy_(gradient)
        leaf.grad = gradient.double()
        if params.grad_clip_norm > 0:
            torch.nn.utils.clip_grad_norm_([leaf], params.grad_clip_norm)
        theirs.step()
        report = optimizer_step(ours, params)
        assert report.grad_norm == pytest.approx(float(gradient.double().norm()), rel=1e-6)
        error = (ours.master.double() - leaf.detach()).norm() / leaf.detach().norm()
        assert error <= 1e-6, f"step {step}: {error:.1e}"


def step_of_0_1(adapter: TrainingAdapter, params: AdamParams) -> dict[str, float]:
    """A step as in version 0.1, whose logs are replayed: the bits must stay the same."""
    grad, weights, m, v = adapter.grad, adapter.master, adapter.m, adapter.v
    grad_norm = float(torch.linalg.vector_norm(grad, dtype=torch.float64))
    if params.grad_clip_norm > 0:
        grad.mul_(min(1.0, params.grad_clip_norm / (grad_norm + 1e-6)))
    before = weights.clone()
    adapter.step += 1
    if params.weight_decay:
        weights.mul_(1 - params.learning_rate * params.weight_decay)
    m.lerp_(grad, 1 - params.beta1)
    v.mul_(params.beta2).addcmul_(grad, grad, value=1 - params.beta2)
    correction_m, correction_v = 1 - params.beta1**adapter.step, 1 - params.beta2**adapter.step
    denominator = v.sqrt().div_(math.sqrt(correction_v)).add_(params.eps)
    weights.addcdiv_(m, denominator, value=-params.learning_rate / correction_m)
    grad.zero_()
    adapter.refresh_live()
    moved = torch.linalg.vector_norm(weights - before, dtype=torch.float64)
    return {
        "grad_norm:mean": grad_norm,
        "update_norm:mean": float(moved),
        "learning_rate:mean": params.learning_rate,
    }


@pytest.mark.parametrize("part", [optimizer.PART_ELEMENTS, 1000, 7])
def test_steps_have_the_bits_they_had_in_0_1(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = adapter(), adapter()
    generator = torch.Generator().manual_seed(4)
    params = AdamParams(learning_rate=1e-2, weight_decay=0.1, beta1=0.8, grad_clip_norm=2.0)
    for step in range(STEPS):
        gradient = torch.randn(ours.grad.shape, generator=generator) * 10.0 ** (step % 7 - 4)
        ours.grad.copy_(gradient)
        theirs.grad.copy_(gradient)
        expected = step_of_0_1(theirs, params)
        with monkeypatch.context() as patched:
            patched.setattr(optimizer, "PART_ELEMENTS", part)
            found = optimizer_step(ours, params).metrics()
        # In parts only the norms may differ, in the last bits of float64.
        assert found == (
            expected if part == optimizer.PART_ELEMENTS else pytest.approx(expected, rel=1e-13)
        )
        for name in ("master", "m", "v", "grad", "live"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (step, name)


def peak_bytes(function: Callable[[], object]) -> int:
    """Peak of the additional memory that torch allocates during the call."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        function()
    taken = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            peak = max(peak, taken)
    return peak


@pytest.mark.parametrize(
    ("family", "params"),
    [
        ("adamw", AdamParams()),
        ("dimuon", DimuonParams(learning_rate=1e-3)),
        # Steps that might exceed float32, but do not.
        ("adamw", AdamParams(learning_rate=1.0, eps=1e-30)),
        ("dimuon", DimuonParams(learning_rate=1e31)),
    ],
)
def test_a_step_takes_no_memory_that_grows_with_the_adapter(
    family: str, params: AdamParams | DimuonParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "PART_ELEMENTS", 2**16)
    monkeypatch.setattr(optimizer, "STACK_ELEMENTS", 2**16)
    peaks = []
    for layers in (20, 80):
        targets = [
            Target(name=str(i), kind="mlp", inputs=512, outputs=256, group=str(i))
            for i in range(layers)
        ]
        large = TrainingAdapter(
            lora=LoraConfig(rank=16),
            targets=targets,
            seed=1,
            model_dtype=torch.float32,
            device=torch.device("cpu"),
            optimizer=family,
        )
        large.grad.normal_()
        peaks.append(peak_bytes(lambda large=large: optimizer_step(large, params)))
    assert peaks[1] <= peaks[0] * 1.1
    assert peaks[1] < large.master.nbytes / 2


def test_a_step_resets_the_gradient() -> None:
    ours = adapter()
    ours.grad.fill_(0.5)
    optimizer_step(ours, AdamParams())
    assert not ours.grad.any()
    assert ours.step == 1


def test_a_step_without_a_gradient_is_a_step_with_a_zero_one() -> None:
    ours = adapter()
    before = ours.master.clone()
    report = optimizer_step(ours, AdamParams(learning_rate=0.5, weight_decay=0.5))
    torch.testing.assert_close(ours.master, before * 0.75)
    assert (report.grad_norm, ours.step) == (0.0, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(bad: float) -> None:
    ours = adapter()
    ours.grad.fill_(0.5)
    optimizer_step(ours, AdamParams())
    ours.grad.fill_(0.25)
    ours.grad[17] = bad
    before = [tensor.clone() for tensor in (ours.master, ours.m, ours.v)]
    with pytest.raises(UserFailure, match=r"not finite .* step 2 was not taken"):
        optimizer_step(ours, AdamParams())
    assert ours.step == 1
    for tensor, old in zip((ours.master, ours.m, ours.v), before, strict=True):
        assert torch.equal(tensor, old)


def test_small_updates_are_not_lost_in_a_bfloat16_model() -> None:
    """Each step is below bfloat16's resolution; the float32 master adds them up."""
    ours = adapter(torch.bfloat16)
    ours.master.fill_(1.0)
    for _ in range(200):
        ours.grad.fill_(1.0)
        optimizer_step(ours, AdamParams(learning_rate=1e-4))
    assert float(ours.live[0]) == pytest.approx(0.98, abs=0.004)


@pytest.mark.parametrize(
    ("params", "size"),
    [
        (AdamParams(learning_rate=1e308), 1.0),
        (AdamParams(learning_rate=3.4e38), 1.0),
        (AdamParams(learning_rate=1e38, beta1=0.999), 1.0),
        (AdamParams(learning_rate=1e38), 1.0),
        (AdamParams(learning_rate=1e30, weight_decay=1e30), 1.0),
        (AdamParams(learning_rate=1e25, weight_decay=1e13), 1.0),
        (AdamParams(eps=1e308), 1.0),
        (AdamParams(weight_decay=1e308), 1.0),
        (AdamParams(), 1e30),
        (AdamParams(grad_clip_norm=1e35, learning_rate=1e-3), 1e30),
        (AdamParams(learning_rate=1e10, eps=1e-30, beta2=0.0), 1e-35),
        (AdamParams(learning_rate=1e20), 1.0),
        (AdamParams(grad_clip_norm=1e308), 1.0),
    ],
)
def test_a_step_is_finite_or_a_user_failure_that_changes_nothing(
    params: AdamParams, size: float
) -> None:
    ours = adapter(torch.bfloat16)
    for _ in range(2):
        ours.grad.normal_(generator=torch.Generator().manual_seed(1)).mul_(size)
        before = {
            name: getattr(ours, name).clone() for name in ("master", "m", "v", "grad", "live")
        }
        steps = ours.step
        try:
            report = optimizer_step(ours, params)
        except UserFailure:
            assert ours.step == steps
            for name, old in before.items():
                assert torch.equal(getattr(ours, name), old), name
        else:
            assert all(math.isfinite(number) for number in report.metrics().values())
            for name in ("master", "m", "v"):
                assert getattr(ours, name).isfinite().all(), name


def test_ordinary_steps_need_not_be_tried_first() -> None:
    ours = adapter()
    for params in (AdamParams(), AdamParams(learning_rate=1.0, weight_decay=0.1)):
        ours.grad.normal_().mul_(1e3)
        norm = float(ours.grad.norm())
        assert not optimizer._may_overflow(ours, params, norm)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (AdamParams(learning_rate=1e308), r"adam_params\.learning_rate is 1e\+308; .* below 3\.4"),
        (AdamParams(learning_rate=1e38), r"learning_rate 1e\+38.* smaller learning rate"),
        (AdamParams(eps=1e308), r"adam_params\.eps is 1e\+308"),
        (AdamParams(weight_decay=1e308), r"adam_params\.weight_decay is 1e\+308"),
    ],
)
def test_a_number_beyond_float32_is_named(params: AdamParams, says: str) -> None:
    ours = adapter()
    ours.grad.fill_(1.0)
    with pytest.raises(UserFailure, match=says):
        optimizer_step(ours, params)
