"""Optimizers of other packages: weights, masters and states are those of plain FP32 training, bit for bit, at each level.

A script has an accumulation, a step that overflows and leaves nothing behind, and goes on from its file in new objects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import lion_pytorch
import pytest
import pytorch_optimizer
import schedulefree
import timm.optim
import torch
from bits import differences
from pairs import pairs
from play import DOORS, Act, Amp, Part, Plain, Setup, oracle_of, play
from pytorch_optimizer import load_optimizer
from timm.optim import create_optimizer_v2
from torch.optim import SGD, Optimizer
from transformers.optimization import Adafactor

from amp_wrapper.errors import AmpError

LEVELS = ('O1', 'O2', 'O4', 'O5')
Make = Callable[[Any], Optimizer]
OF_PYTORCH_OPTIMIZER = """
a2grad accsgd adabelief adabound adadelta adafactor adagc adai adalite adam adamax adamc adamg adamod adamp adams adamw adamwsn
adan adanorm adapnm adashift adasmooth adatam ademamix adopt aggmo aida alice amos ano apollo apollodqn asgd avagrad bcos came
conda dadaptadagrad dadaptadam dadaptadan dadaptlion dadaptsgd dash diffgrad dualadam emofact emolynx emonavi exadam fadam fira
flashadamw focus fromage ftrl galore grams gravity grokfastadamw kate lamb laprop lars lion madgrad magma mars msvag nadam nero
novograd padam pid pnm prodigy qhadam qhm racs radam ranger rmsprop rose sara scalableshampoo schedulefreeadamw
schedulefreeradam schedulefreesgd scion scionlight sgd sgdp sgdsai sgdw shampoo signsgd simplifiedademamix sm3 soap spam splus
srmm stableadamw stablespam swats tam tiger vsgd yogi
""".split()
OF_TIMM = """
adabelief adadelta adafactor adafactorbv adagrad adam adamax adamp adamuon adamw adan adanw adopt adoptc cadafactor cadafactorbv
cadamp cadamw cadan cadanw cadopt cadoptc clamb claprop clion cmars cnadamw crmsproptf csgdc csgdp kron lamb lambc lambw laprop
larc lars lion lookahead_adamw lookahead_momentum madgrad madgradw mars momentum muon nadam nadamc nadamuon nadamw nesterov
nlarc nlars nmuon novograd novogradc radabelief radam rmsprop rmsproptf sgd sgdp sgdw
""".split()
#: Not tried here: refused; for pairs of LoRA matrices, matrices or process groups alone; with groups of their own, as Muon has;
#: for the model, second derivatives or the length of the training; in place of the whole loop; slow (that of timm is fast).
LEFT_OUT = """
lbfgs bsam alig lorarite spectralsphere demo distributedmuon adago adamuon muon muonclip normuon adammini adahessian sophiah
ranger21 lomo adalomo kron
""".split()


def momentum(groups: Any) -> Optimizer:
    return SGD(groups, lr=0.03, momentum=0.9)


OPTIMIZERS: dict[str, Make] = {
    **{name: lambda groups, name=name: load_optimizer(name)(groups) for name in OF_PYTORCH_OPTIMIZER},
    **{f'timm {name}': lambda groups, name=name: create_optimizer_v2(groups, name, lr=0.01) for name in OF_TIMM},
    'Lookahead': lambda g: pytorch_optimizer.Lookahead(momentum(g), k=2, pullback_momentum='pullback'),
    'OrthoGrad': lambda groups: pytorch_optimizer.OrthoGrad(momentum(groups)),
    'TRAC': lambda groups: pytorch_optimizer.TRAC(momentum(groups), s_prev=0.1),
    'lion-pytorch': lambda groups: lion_pytorch.Lion(groups, weight_decay=0.1),
    'lion-pytorch, decoupled': lambda groups: lion_pytorch.Lion(groups, weight_decay=0.1, decoupled_weight_decay=True),
    'transformers Adafactor': lambda groups: Adafactor(groups, scale_parameter=False, relative_step=False, beta1=0.9),
    **{name: getattr(torch.optim, name) for name in ('Adafactor', 'NAdam', 'RAdam', 'ASGD', 'Rprop', 'Adadelta')},
}
SCRIPT: list[Act] = [
    *[('backward', (0, 1), 0), ('step',)],
    *[('backward', (0,), 1, 0), ('step',)],
    *[('backward', (0, 1), 2), ('backward', (1,), 3), ('step',)],
    ('save_and_load',),
    *[('backward', (0, 1), 4), ('step',), ('evaluate',)],
]


@dataclasses.dataclass(frozen=True)
class Foreign(Setup):
    """With a rate for each group that suits adaptive optimizers, too."""

    def group(self, part: Part, index: int) -> dict[str, Any]:
        return {'params': part.trained, 'lr': 0.01 / 2**index}


def check_seeded(script: list[Act], door: type[Plain], setup: Setup) -> None:
    """As ``play.check``, of optimizers that draw random numbers."""
    found = []
    for one, its in ((door, setup), (Plain, oracle_of(door, setup))):
        torch.manual_seed(0)
        found.append(play(script, one, its))
    assert found[0] == found[1]


@pytest.fixture(autouse=True)
def _files_with_objects_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the optimizers keep objects of their own in their states."""
    load = torch.load
    monkeypatch.setattr(torch, 'load', lambda file, **_: load(file, weights_only=False))


@pytest.mark.parametrize(('level', 'door'), [('O2', 'amp'), ('O5', 'wrapper')])
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_trains_as_in_fp32(name: str, level: str, door: str) -> None:
    check_seeded(SCRIPT, DOORS[door], Foreign(level, OPTIMIZERS[name]))


@pytest.mark.xfail(strict=True, reason='openmmlab', raises=AmpError)
def test_file_of_an_optimizer_without_a_rate_of_its_own_is_loaded() -> None:
    """Each group has its rate; the default of ``torch.optim`` of old, ``required``, is in the file of the wrapper."""
    check_seeded(SCRIPT, DOORS['wrapper'], Foreign('O5', lambda groups: create_optimizer_v2(groups, 'sgdp')))


@pairs(level=LEVELS, door=DOORS, name=('AdamW', 'SGD', 'RAdam'))
def test_modes_of_schedulefree(name: str, level: str, door: str) -> None:
    """Weights of training and of evaluation are exchanged by ``train()`` and ``eval()``; a file is written in the latter."""
    script = [('call', 'train'), *SCRIPT[:7], ('call', 'eval'), ('evaluate',), ('look',), ('save_and_load',)]
    script += [('call', 'train'), *SCRIPT[-3:-1], ('call', 'eval')]
    check_seeded(script, DOORS[door], Foreign(level, getattr(schedulefree, f'{name}ScheduleFree')))


Step = Callable[[Plain, Any, int], None]


def weights_after(door: type[Plain], setup: Setup, step: Step, around: Any = None) -> Any:
    """Weights and buffers after some steps of a kind."""
    torch.manual_seed(0)
    training = door(setup)
    outer = training.optimizer if around is None else around(training.optimizer)
    if hasattr(outer, 'train'):
        outer.train()
    for index in range(4):
        step(training, outer, index)
    return training.model.state_dict()


def plain_step(training: Plain, optimizer: Any, index: int) -> None:
    training.backward((0, 1), index)
    optimizer.step()
    optimizer.zero_grad()


def two_steps(training: Plain, optimizer: Any, index: int) -> None:
    training.backward((0, 1), index)
    optimizer.first_step(zero_grad=True)
    training.backward((0, 1), index)
    optimizer.second_step(zero_grad=True)


def step_with_closure(training: Plain, optimizer: Any, index: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        training.backward((0, 1), index)
        return torch.tensor(1.0)

    closure()
    optimizer.step(closure)


SAMS: dict[str, Make] = {
    'SAM': lambda groups: pytorch_optimizer.SAM(groups, SGD, lr=0.03, momentum=0.9),
    'SAM, adaptive AdamW': lambda groups: pytorch_optimizer.SAM(groups, torch.optim.AdamW, rho=0.5, adaptive=True),
    'LookSAM': lambda groups: pytorch_optimizer.LookSAM(groups, SGD, lr=0.03, momentum=0.9),
    'FriendlySAM': lambda groups: pytorch_optimizer.FriendlySAM(groups, SGD, lr=0.03, momentum=0.9),
}
#: What is made around an optimizer that was initialised already. What it does around a skipped step is its own affair.
AROUND: dict[str, Callable[[Optimizer], Any]] = {
    'Lookahead': lambda o: pytorch_optimizer.Lookahead(o, k=2),
    'OrthoGrad': pytorch_optimizer.OrthoGrad,
    'timm Lookahead': lambda o: timm.optim.Lookahead(o, k=2),
    'ScheduleFreeWrapper': lambda o: schedulefree.ScheduleFreeWrapper(o, momentum=0.9),
}
#: How the optimizer is made, what a step is, and what is made around the optimizer.
STEPPED: dict[str, tuple[Make, Step, Any]] = {
    **{f'{name}, two steps': (make, two_steps, None) for name, make in SAMS.items()},
    **{f'{name}, closure': (make, step_with_closure, None) for name, make in SAMS.items()},
    **{f'{name}, closure': (load_optimizer(name), step_with_closure, None) for name in ('emonavi', 'adamw')},
    **{f'around: {name}': (momentum, plain_step, around) for name, around in AROUND.items()},
}


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('name', STEPPED)
def test_steps_of_other_kinds(name: str, level: str) -> None:
    """Two passes a step, the second at weights that the first one moved; closures; optimizers around others."""
    make, *how = STEPPED[name]
    found = weights_after(Amp, Foreign(level, make), *how)
    assert differences(found, weights_after(Plain, Foreign('O0', make), *how)) == []


REFUSED: dict[str, Make] = {
    'BSAM': lambda groups: pytorch_optimizer.BSAM(groups, num_data=8),
    'AliG': lambda groups: pytorch_optimizer.AliG(groups[0]['params'], max_lr=0.1),
}


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('name', REFUSED)
def test_closures_whose_loss_an_optimizer_uses_are_refused(name: str, level: str) -> None:
    training = Amp(Setup(level, REFUSED[name], grouped=1))
    with pytest.raises(AmpError, match=r'closure(?s:.*)O0'):
        step_with_closure(training, training.optimizer, 0)


def test_all_of_pytorch_optimizer_are_listed() -> None:
    assert set(pytorch_optimizer.get_supported_optimizers()) == {*OF_PYTORCH_OPTIMIZER, *LEFT_OUT}
