"""Weights that are 16-bit before, that share memory with a flat parameter, or that follow others in small steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bits import same_bits
from pairs import pairs
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from toy_training import CAST, LEVELS, MASTERED, Training

from amp_wrapper import AmpAttachError, FusedAdamW, amp

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DOORS = ('amp', 'wrapper')
X = torch.linspace(-1, 1, 20).reshape(5, 4)


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.1, eps=1e-3)


def losses(run: Training, steps: int = 4) -> list[float]:
    found = []
    for _ in range(steps):
        loss = run.forward(X).float().square().mean()
        found.append(float(loss.detach()))
        run.backward(loss)
        run.step()
        run.clear()
    return found


# -- weights that are 16-bit before ----------------------------------------------------------------------------------------


@pairs(level=LEVELS, door=DOORS, dtype=(F16, BF16))
def test_trained_16_bit_weights_are_taken_on_request(level: str, door: str, dtype: torch.dtype, log: list[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(dtype)
    model[2].float()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AmpAttachError, match=r'16-bit already: 0\.weight.*from_16bit=True'):
        Training(level, door, adamw, model)
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
    run = Training(level, door, adamw, model, from_16bit=True, verbosity=1, loss_scale=8.0)
    (line,) = [line for line in log if '16-bit before' in line]
    assert '4 trainable weights' in line and '2.weight' not in line
    kept = F16 if level == 'O3' else F32
    assert {p.dtype for p in run.masters()} == {model[1].weight.dtype, model[1].running_mean.dtype} == {kept}
    assert model[0].weight.dtype is CAST.get(level, F32)
    # the values as they were, where there is room for them
    saved = model.state_dict()
    assert all(level == 'O3' or torch.equal(saved[name].float(), before[name].float()) for name in before)
    first, *_, last = losses(run)
    assert last < first and model.state_dict()['0.weight'].dtype is F32


class Adapted(nn.Module):
    """A frozen 16-bit base with an FP32 adapter beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.base = nn.LayerNorm(4).to(dtype), nn.Linear(4, 4).to(dtype)
        for part in (self.norm, self.base):
            part.requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(torch.relu(self.base(x) + self.up(self.down(x)).to(self.base.weight.dtype)))


@pairs(level=[level for level in LEVELS if level != 'O0'], door=DOORS, dtype=(F16, BF16), owns=('all', 'trained'))
def test_frozen_16_bit_parts_are_kept(level: str, door: str, dtype: torch.dtype, owns: str, log: list[str]) -> None:
    """No permission, no warning, no master; in training, files and a resume."""

    def make(parameters: Any) -> AdamW:
        return adamw([p for p in parameters if owns == 'all' or p.requires_grad])

    model = Adapted(dtype)
    before = copy.deepcopy(model.state_dict())
    run = Training(level, door, make, model, verbosity=1, loss_scale=8.0)
    assert not [line for line in log if '16-bit before' in line]
    assert {p.dtype for p in run.masters() if p.requires_grad} == {F16 if level == 'O3' else F32}
    if owns == 'all' and level in CAST:
        assert {p.dtype for p in run.masters() if not p.requires_grad} == {CAST[level]}
    first, *_, last = losses(run)
    saved = copy.deepcopy([model.state_dict(), run.optimizer.state_dict()])
    # at the levels that cast, files are FP32; elsewhere frozen parts are as they came
    assert last < first and saved[0]['base.weight'].dtype is (F32 if level in CAST else dtype)
    if CAST.get(level, dtype) is dtype:
        assert torch.equal(saved[0]['base.weight'].float(), before['base.weight'].float())
    expected = losses(run, 2)
    resumed = Training(level, door, make, Adapted(dtype), loss_scale=8.0)
    resumed.model.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    assert losses(resumed, 2) == expected


@pairs(level=MASTERED, door=(*DOORS, 'split'))
def test_frozen_part_that_is_trained_later_gets_fp32_values(level: str, door: str) -> None:
    options = dict(make=FusedAdamW, master_weights='split') if door == 'split' else dict(make=adamw)
    run = Training(level, door.replace('split', 'wrapper'), model=Adapted(BF16), loss_scale=8.0, **options)
    for trains in (False, True):
        run.model.requires_grad_(trains)
        run.model.head.requires_grad_(True)
        before = run.model.state_dict()['base.weight'].clone()
        losses(run, 1)
        after = run.model.state_dict()['base.weight']
        assert torch.equal(before, after) is not trains
        assert torch.equal(after.to(CAST[level]), run.model.base.weight)
    assert not torch.equal(after, run.model.base.weight.float())


# -- one flat parameter that shares memory with the weights -------------------------------------------------------------------


def flatten(model: nn.Module, spare: int = 0) -> nn.Parameter:
    """One parameter of all weights, and some more elements; the weights become views of it."""
    weights = list(model.parameters())
    flat = nn.Parameter(torch.cat([w.data.flatten() for w in weights] + [weights[0].new_ones(spare)]))
    for weight, part in zip(weights, flat.data.split([w.numel() for w in weights] + [spare])):
        weight.data = part.view_as(weight)
    return flat


@pairs(level=LEVELS, door=DOORS, of=('model', 'first layer'))
def test_flat_parameter_is_refused_where_a_cast_breaks_the_sharing(level: str, door: str, of: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    flat = flatten(model if of == 'model' else model[0])
    before = copy.deepcopy(model.state_dict())

    def make(parameters: Any) -> SGD:
        return SGD([flat, *(model[1].parameters() if of != 'model' else ())], lr=0.1)

    if level not in CAST:
        Training(level, door, make, model)
    else:
        with pytest.raises(AmpAttachError, match=r'share memory with weights of the model.*O4.*model\.parameters\(\)'):
            Training(level, door, make, model)
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
    assert flat.data_ptr() == model[0].weight.data_ptr()


@pairs(level=CAST, door=DOORS, kind=('tied by .data', 'views of one memory', 'neighbours in one memory'))
def test_weights_that_share_memory_are_taken_where_the_optimizer_has_them(level: str, door: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    held = list(model.parameters())
    if kind == 'tied by .data':
        model[2].weight.data = model[0].weight.data
    else:
        flat = flatten(model, spare=3)
    if 'neighbours' in kind:
        # the others are weights that nobody steps
        held = [*model[1].parameters(), nn.Parameter(flat.data[-3:])]
    Training(level, door, lambda _: SGD(held, lr=0.1), model)
    assert model[1].weight.dtype is CAST[level]


# -- networks that follow others in small steps ------------------------------------------------------------------------------


def body(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), *more)


def frozen() -> nn.Linear:
    return nn.Linear(4, 4).requires_grad_(False)


def within(**parts: nn.Module) -> nn.Module:
    """A module that holds others below two names."""
    return nn.Sequential(nn.ModuleDict(parts))


#: Networks with frozen parts: those whose name begins with ``teacher`` stay FP32, the others are cast.
NETWORKS: dict[str, dict[str, nn.Module]] = {
    'a momentum encoder': dict(student=nn.Linear(4, 4), teacher=nn.Linear(4, 4), head=nn.Linear(4, 2)),
    'in a wrapper': dict(student=body(), teacher=within(module=body())),
    # BYOL: encoder and projector, and nothing like the predictor
    'without the last layer': dict(student=body(nn.Linear(4, 4)), teacher=body()),
    'two': dict(student=body(), teacher=body(), teacher_two=body()),
    'the first layers of a network': dict(layers=nn.Sequential(frozen(), frozen(), nn.Linear(4, 4), nn.Linear(4, 4))),
    'layers of adapters': dict(one=frozen(), two=frozen(), three=frozen(), head=nn.Linear(4, 4)),
    'an encoder with more layers': dict(text=nn.Sequential(frozen(), frozen()), image=nn.Sequential(nn.Linear(4, 4))),
}


@pytest.mark.parametrize('name', NETWORKS)
def test_frozen_copy_of_a_trained_part_stays_float32(name: str, log: list[str]) -> None:
    model = nn.ModuleDict(copy.deepcopy(NETWORKS[name]))
    for key, part in model.items():
        if key.startswith('teacher'):
            part.requires_grad_(False)
    amp.initialize(model, opt_level='O5', verbosity=1)
    for key, parameter in model.named_parameters():
        assert parameter.dtype is (F32 if key.startswith('teacher') else BF16), key
    assert bool([line for line in log if 'teacher' in line and 'stay FP32' in line]) is ('teacher' in model)
