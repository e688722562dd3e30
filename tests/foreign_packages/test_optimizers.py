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
from play import DOORS, Act, Amp, Part, Plain, Setup, oracle_of, play
from pytorch_optimizer import load_optimizer
from timm.optim import create_optimizer_v2
from torch.optim import SGD, Optimizer
from transformers.optimization import Adafactor

from amp_wrapper import amp
from amp_wrapper.errors import AmpError

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
#: Not tried here, and why.
LEFT_OUT = {
    'lorarite': 'for pairs of LoRA matrices alone',
    'adago': 'asks for groups of its own, as Muon does',
    'demo': 'works in chunks of a size that these weights have not',
    'distributedmuon': 'for process groups',
    'kron': 'takes a second a step (that of timm is fast)',
    'lbfgs': 'refused',
    'ranger21': 'asks for the length of the training',
    'spectralsphere': 'for matrices alone',
    'bsam': 'refused',
    'alig': 'refused',
    'lomo': 'takes the place of the whole loop',
    'adalomo': 'takes the place of the whole loop',
    **dict.fromkeys(('adamuon', 'muon', 'muonclip', 'normuon'), 'asks for groups of its own'),
    **dict.fromkeys(('adammini', 'adahessian', 'sophiah'), 'asks for the model, or for second derivatives'),
}


def momentum(groups: Any) -> Optimizer:
    return SGD(groups, lr=0.03, momentum=0.9)


OPTIMIZERS: dict[str, Make] = {
    **{name: lambda groups, name=name: load_optimizer(name)(groups) for name in OF_PYTORCH_OPTIMIZER},
    **{f'timm {name}': lambda groups, name=name: create_optimizer_v2(groups, name, lr=0.01) for name in OF_TIMM},
    'Lookahead': lambda groups: pytorch_optimizer.Lookahead(momentum(groups), k=2),
    'Lookahead, pullback': lambda g: pytorch_optimizer.Lookahead(momentum(g), k=2, pullback_momentum='pullback'),
    'OrthoGrad': lambda groups: pytorch_optimizer.OrthoGrad(momentum(groups)),
    'TRAC': lambda groups: pytorch_optimizer.TRAC(momentum(groups), s_prev=0.1),
    'lion-pytorch': lambda groups: lion_pytorch.Lion(groups, weight_decay=0.1),
    'lion-pytorch, decoupled': lambda groups: lion_pytorch.Lion(groups, weight_decay=0.1, decoupled_weight_decay=True),
    'transformers Adafactor': lambda groups: Adafactor(groups, scale_parameter=False, relative_step=False, beta1=0.9),
    **{
        f'torch {name}': lambda groups, name=name: getattr(torch.optim, name)(groups)
        for name in ('Adafactor', 'NAdam', 'RAdam', 'ASGD', 'Rprop', 'Adadelta')
    },
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


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', ['O1', 'O4', 'O2', 'O5'])
@pytest.mark.parametrize(
    'name', ['AdamWScheduleFree', 'SGDScheduleFree', 'RAdamScheduleFree', 'AdamWScheduleFreeReference']
)
def test_modes_of_schedulefree(name: str, level: str, door: str) -> None:
    """Weights of training and of evaluation are exchanged by ``train()`` and ``eval()``; a file is written in the latter."""
    make = getattr(schedulefree, name)
    script = [('call', 'train'), *SCRIPT[:7], ('call', 'eval'), ('evaluate',), ('look',), ('save_and_load',)]
    script += [('call', 'train'), *SCRIPT[-3:-1], ('call', 'eval')]
    check_seeded(script, DOORS[door], Foreign(level, make))


#: What is made around an optimizer that was initialised already. What it does around a skipped step is its own affair.
AROUND: dict[str, Callable[[Optimizer], Any]] = {
    'Lookahead': lambda o: pytorch_optimizer.Lookahead(o, k=2),
    'OrthoGrad': pytorch_optimizer.OrthoGrad,
    'timm Lookahead': lambda o: timm.optim.Lookahead(o, k=2),
    'ScheduleFreeWrapper': lambda o: schedulefree.ScheduleFreeWrapper(o, momentum=0.9),
}
SAMS: dict[str, Make] = {
    'SAM': lambda groups: pytorch_optimizer.SAM(groups, SGD, lr=0.03, momentum=0.9),
    'SAM, adaptive AdamW': lambda groups: pytorch_optimizer.SAM(groups, torch.optim.AdamW, rho=0.5, adaptive=True),
    'LookSAM': lambda groups: pytorch_optimizer.LookSAM(groups, SGD, lr=0.03, momentum=0.9),
    'FriendlySAM': lambda groups: pytorch_optimizer.FriendlySAM(groups, SGD, lr=0.03, momentum=0.9),
}


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


def compare(level: str, make: Make, step: Step, around: Any = None) -> None:
    found = weights_after(Amp, Foreign(level, make), step, around)
    expected = weights_after(Plain, Foreign('O0', make), step, around)
    assert differences(found, expected) == []


@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
@pytest.mark.parametrize('name', AROUND)
def test_around_an_initialised_optimizer(name: str, level: str) -> None:
    compare(level, momentum, plain_step, AROUND[name])


@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
@pytest.mark.parametrize('step', [two_steps, step_with_closure])
@pytest.mark.parametrize('name', SAMS)
def test_sharpness_aware(name: str, step: Any, level: str) -> None:
    """Two passes a step, the second at weights that the first one moved."""
    compare(level, SAMS[name], step)


@pytest.mark.parametrize('level', ['O2', 'O4', 'O5'])
@pytest.mark.parametrize('name', ['emonavi', 'adamw'])
def test_closures(name: str, level: str) -> None:
    compare(level, load_optimizer(name), step_with_closure)


#: Refused at the first step, with the words that help.
REFUSED: dict[str, tuple[Make, Step, list[str]]] = {
    'BSAM': (lambda g: pytorch_optimizer.BSAM(g, num_data=8), step_with_closure, ['closure', 'O0']),
    'AliG': (lambda g: pytorch_optimizer.AliG(g, max_lr=0.1), step_with_closure, ['closure', 'O0']),
    'LBFGS': (torch.optim.LBFGS, plain_step, ['LBFGS', 'several times']),
}


def begin_and_step(level: str, make: Make, step: Step) -> None:
    # some of them take no groups
    training = Amp(Setup(level, lambda groups: make(list(groups[0]['params'])), grouped=1))
    step(training, training.optimizer, 0)


@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
@pytest.mark.parametrize('name', REFUSED)
def test_refused(name: str, level: str) -> None:
    make, step, words = REFUSED[name]
    with pytest.raises(AmpError) as error:
        begin_and_step(level, make, step)
    assert all(word in str(error.value) for word in words)


SECOND: dict[str, Make] = {
    'AdaHessian': lambda groups: pytorch_optimizer.AdaHessian(groups),
    'SophiaH': lambda groups: pytorch_optimizer.SophiaH(groups),
    'timm adahessian': lambda groups: create_optimizer_v2(groups, 'adahessian'),
}


@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
@pytest.mark.parametrize('name', SECOND)
def test_second_derivatives(name: str, level: str) -> None:
    """A graph of gradients is right where they are neither scaled nor copied: at O4 alone, and the others say so."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = SECOND[name]([{'params': list(model.parameters()), 'lr': 0.1}])
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step() -> float:
        loss = model(torch.ones(2, 4)).pow(2).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if level == 'O4':
        losses = [step() for _ in range(8)]
        assert losses[-1] < losses[0]
        return
    with pytest.raises(AmpError) as error:
        step()
    assert all(word in str(error.value) for word in ['create_graph', "opt_level='O4'", 'torch.autograd.grad'])


def test_all_of_pytorch_optimizer_are_listed() -> None:
    assert set(pytorch_optimizer.get_supported_optimizers()) == {*OF_PYTORCH_OPTIMIZER, *LEFT_OUT}
