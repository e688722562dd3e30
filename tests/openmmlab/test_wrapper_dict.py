"""Several wrappers over one model, as GANs have: whose loss reaches whose parameters, at which scale, and who skips."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from pairs import pairs
from play import SCALE, WEIGHT_TYPES, Part, Scale, data, fused_sgd, sgd
from torch import Tensor, nn

from amp_wrapper import AmpAttachError, AmpOptimWrapper

Levels = tuple[str, str] | None


class Gan(nn.Module):
    """A generator and a discriminator, linear in their weights, and a part that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.g = Part(1)
        self.d = Part(2)
        self.perceptual = nn.Linear(2, 2).requires_grad_(False)


class Training:
    """Plays scripts, with exact numbers.

    ``g`` and ``d`` are backward passes: the loss of the generator reaches the discriminator, that of the discriminator does not
    reach the generator. ``g*`` and ``d*`` overflow in the discriminator. ``G`` and ``D`` are steps. ``freeze`` and ``thaw`` are
    for the discriminator, ``clear`` clears gradients of its module, and ``save`` goes on from a file in new objects.

    Args:
        levels: Of generator and discriminator; None is FP32 training with mmengine's wrappers, which leaves out what overflows.
        make: The optimizers.
        masters: Whether losses contain what both optimizers step.
        options: More for the wrappers.
    """

    def __init__(self, levels: Levels, make: Callable[..., Any] = sgd, masters: bool = False, **options: Any) -> None:
        self.words = dict(levels=levels, make=make, masters=masters, **options)
        self.levels, self.masters = levels, masters
        self.model = Gan()
        self.scales = {'g': Scale(), 'd': Scale()}
        #: Whether a pass of the member has overflowed since its last step; and whether what it steps is infinite.
        self.own: dict[str, bool] = {}
        self.spoiled: set[str] = set()
        members: dict[str, OptimWrapper] = {}
        for index, name in enumerate('gd'):
            optimizer = make([{'params': self.part(name).trained, 'lr': 0.25 / 2**index}])
            if levels is None:
                members[name] = OptimWrapper(optimizer)
            else:
                words = dict(opt_level=levels[index], loss_scale=SCALE, verbosity=0) | options
                members[name] = AmpOptimWrapper(optimizer=optimizer, **words)
        self.wrappers = OptimWrapperDict(**members)

    def part(self, name: str) -> Any:
        return self.model.get_submodule(name)

    def stepped(self, name: str) -> list[Tensor]:
        return [p for group in self.wrappers[name].optimizer.param_groups for p in group['params']]

    def backward(self, name: str, index: int, overflow: bool) -> None:
        with self.wrappers[name].optim_context(self.model):
            loss = self.part('d')(data(index) * 2)
            loss = loss + self.part('g')(data(index + 1)) if name == 'g' else loss
        if self.masters:
            loss = loss + torch.stack([p.square().sum() for each in 'gd' for p in self.stepped(each)]).sum() / 2
        weight = self.model.d.fc.weight
        handle = weight.register_hook(lambda grad: torch.full_like(grad, torch.inf)) if overflow else None
        self.wrappers[name].backward(loss)
        if handle is not None:
            handle.remove()
        self.own[name] = self.own.get(name, False) or overflow
        self.spoiled |= {name, 'd'} if overflow else set()

    def step(self, name: str) -> None:
        wrapper = self.wrappers[name]
        if self.levels is not None or name not in self.spoiled:
            wrapper.step()
        if self.levels is not None:
            assert wrapper.step_was_skipped() is (name in self.spoiled)
        wrapper.zero_grad()
        if name in self.own:
            self.scales[name].update(self.own.pop(name))
        self.spoiled.discard(name)

    def save(self) -> None:
        if self.levels is None:
            return
        kept = self.scales, self.own, self.spoiled
        saved = copy.deepcopy((self.model.state_dict(), self.wrappers.state_dict()))
        self.__init__(**self.words)  # type: ignore[misc]
        self.scales, self.own, self.spoiled = kept
        self.model.load_state_dict(saved[0])
        self.wrappers.load_state_dict(saved[1])
        self.wrappers.initialize_count_status(self.model, 0, 100)

    def play(self, script: str) -> Training:
        for index, act in enumerate(script.split()):
            if act[0] in 'gd' and act[1:] in ('', '*'):
                self.backward(act[0], index, act[1:] == '*')
            elif act in 'GD':
                self.step(act.lower())
            elif act == 'save':
                self.save()
            elif act == 'clear':
                self.model.d.zero_grad()
                self.spoiled.discard('d')
            else:
                for parameter in (*self.model.d.parameters(), *self.stepped('d')):
                    parameter.requires_grad_(act == 'thaw')
        return self

    def state(self) -> dict[str, Any]:
        """FP32 weights and moments, without buffers: whose statistics are restored is tested with those."""
        found = {
            k: v.tolist()
            for k, v in self.model.state_dict().items()
            if k[0] in 'gd' and k[2:] not in ('total', 'count')
        }
        for name in 'gd':
            optimizer = self.wrappers[name].optimizer
            moments = [optimizer.state[p].get('momentum_buffer') for p in self.stepped(name) if p in optimizer.state]
            found |= {f'{name} {i}': None if m is None else m.tolist() for i, m in enumerate(moments)}
        return found


LEVELS = [('O0', 'O0'), ('O2', 'O2'), ('O2', 'O5'), ('O5', 'O2'), ('O1', 'O2'), ('O2', 'O0'), ('O4', 'O1')]
SETUPS: dict[str, dict[str, Any]] = {
    'bare': {},
    'sums in FP32': dict(accumulate_in_fp32=True),
    'two losses': dict(num_losses=2),
    'masters in losses': dict(masters=True),
}
SCRIPTS = {
    'turns, and gradients wait for the other': 'd D g G d D g G d D',
    'turns with a frozen discriminator': 'freeze g G thaw d D freeze g G thaw d D',
    'one joint loss and two steps': 'g G D g D G',
    'gradients are added to those that wait': 'd g G g G d D g G D',
    'the loss of the generator overflows in the discriminator': 'g* G d D g G d D',
    'the loss of the discriminator overflows': 'd* D g G d d* D g G D',
    'both losses overflow in the discriminator': 'g* d* G D g d G D d* g* G D d D',
    'an overflow in one of two passes': 'g g* d G D d g D G',
    'a file while gradients of the other wait': 'd D g G save d D g G',
    'a file in accumulations of both': 'd g save g d G D g G',
    'a file after an overflow': 'd D g* G save d D d* save D d D g G',
    'a file after the loss of the other has overflowed': 'd g* save D G',
}


@functools.cache
def plain(script: str, masters: bool = False) -> dict[str, Any]:
    return Training(None, masters=masters).play(script).state()


@pairs(levels=LEVELS, setup=SETUPS, make=(sgd, fused_sgd))
def test_members_train_as_in_fp32(levels: Any, setup: str, make: Any) -> None:
    wrong: list[Any] = []
    for name, script in SCRIPTS.items():
        run = Training(levels, make, **SETUPS[setup]).play(script)
        found, wanted = run.state(), plain(script, run.masters)
        wrong += [(name, key) for key, value in wanted.items() if found[key] != value]
        for member, level in zip('gd', levels):
            scale = run.wrappers[member].loss_scaler.get_scale(), run.scales[member].value
            wrong += [(name, member, *scale)] if scale[0] != scale[1] else []
            assert run.part(member).fc.weight.dtype is WEIGHT_TYPES.get(level, torch.float32)
        assert run.model.perceptual.weight.dtype is torch.float32
    assert wrong == []


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_masters_of_members_with_several_losses_in_the_loss_of_another(level: str) -> None:
    run = Training((level, level), masters=True, num_losses=2).play('d D g G d D')
    assert run.state() == plain('d D g G d D', masters=True)


def test_gradients_that_the_module_clears_take_their_overflow_along() -> None:
    """Where they are summed in FP32, ``zero_grad`` of the wrapper clears them."""
    script = 'g* G clear d D g G clear d D d D'
    for levels in LEVELS:
        assert Training(levels).play(script).state() == plain(script), levels


@pytest.mark.parametrize('levels', LEVELS)
def test_members_attach_together_without_a_runner(levels: Any) -> None:
    """Also where the first forward pass finds the other member frozen."""
    run = Training(levels)
    run.model.d.requires_grad_(False)
    with run.wrappers['g'].optim_context(run.model):
        for name, level in zip('gd', levels):
            assert run.part(name).fc.weight.dtype is WEIGHT_TYPES.get(level, torch.float32)
    run.model.d.requires_grad_(True)
    assert [len(list(run.wrappers[name].master_params())) for name in 'gd'] == [2, 2]
    assert run.play('d D g G d D').state() == plain('d D g G d D')


def test_accumulations_in_earlier_files_go_on() -> None:
    """Members kept gradients scaled, on the 16-bit weights, as a wrapper without others does."""
    run = Training(('O2', 'O5')).play('d')
    saved = copy.deepcopy((run.model.state_dict(), run.wrappers.state_dict()))
    window = saved[1]['d']['amp']['window']
    assert window['unscaled']
    scaled = [None if g is None else g * SCALE['init_scale'] for g in window['gradients']]
    window.update(unscaled=False, gradients=[scaled[0].bfloat16(), *scaled[1:]])
    run = Training(('O2', 'O5'))
    run.model.load_state_dict(saved[0])
    run.wrappers.load_state_dict(saved[1])
    run.wrappers.initialize_count_status(run.model, 0, 100)
    assert run.play('D').state() == plain('d D')


def test_overflow_at_weights_that_nobody_checks_does_not_reach_them() -> None:
    run = Training(('O2', 'O0'))
    optimizer = run.wrappers['d'].optimizer
    members = dict(g=run.wrappers['g'], d=AmpOptimWrapper(opt_level='O0', optimizer=optimizer, verbosity=0))
    run.wrappers = OptimWrapperDict(**members)
    run.backward('g', 0, overflow=True)
    run.wrappers['d'].step()
    assert all(parameter.isfinite().all() for parameter in run.model.d.parameters())


def test_accumulations_of_members_are_counted_and_resumed() -> None:
    def iterate(run: Training, *indices: int) -> None:
        for index in indices:
            for name in 'dg':
                with run.wrappers[name].optim_context(run.model):
                    loss = run.part(name)(data(index))
                run.wrappers[name].update_params(loss)

    whole, part = (Training(('O2', 'O5'), accumulative_counts=2) for _ in range(2))
    for run in (whole, part):
        iterate(run, 0, 1, 2)
    part.save()
    assert part.wrappers['g'].inner_count == 3
    for run in (whole, part):
        iterate(run, 3, 4)
        assert all('window' in run.wrappers[name].state_dict()['amp'] for name in 'gd')
        iterate(run, 5)
    assert whole.state() == part.state()


def test_losses_that_flow_through_each_other_find_their_scales() -> None:
    """Each brings the other what is too large for float16: both scales have to fall, not wait for one another."""
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for name in 'gd'})
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=1e-6) for name, part in model.items()}
    wrappers = OptimWrapperDict(
        **{name: AmpOptimWrapper(opt_level='O2', optimizer=each, verbosity=0) for name, each in optimizers.items()}
    )
    for step in range(40):
        for wrapper in wrappers.values():
            with wrapper.optim_context(model):
                batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
                loss = model['d'](model['g'](batch)).float().square().mean() * 200
            wrapper.update_params(loss)
    for wrapper in wrappers.values():
        steps, skips, streak = wrapper.loss_scaler.counts.tolist()
        assert steps == 40 and 0 < skips < 25 and streak == 0, (steps, skips, streak)
        assert wrapper.loss_scaler.get_scale() < 2.0**14


def test_sparse_and_dense_gradients_meet() -> None:
    """A table that gets rows from the loss of another member and a dense gradient afterwards, and the other way round."""
    for order in (('rows', 'dense'), ('dense', 'rows')):
        model = nn.ModuleDict(dict(table=nn.Embedding(6, 4, sparse=True), layer=nn.Linear(4, 4)))
        members = {}
        for name, scale in (('table', 1.0), ('layer', 8.0)):
            optimizer = torch.optim.SGD(model[name].parameters(), lr=0.25)
            members[name] = AmpOptimWrapper(opt_level='O0', optimizer=optimizer, loss_scale=scale, verbosity=0)
        wrappers = OptimWrapperDict(**members)
        table: Any = model['table']
        wanted = table.weight.detach() - 0.25 * torch.tensor([1, 3, 2, 1, 1, 1]).unsqueeze(1)
        for kind in order:
            with wrappers['layer'].optim_context(model):
                rows = table(torch.tensor([1, 1, 2])) if kind == 'rows' else table.weight
                loss = rows.sum() + model['layer'].weight.sum()
            wrappers['layer'].backward(loss)
        wrappers['layer'].step()
        wrappers['table'].step()
        torch.testing.assert_close(table.weight, wanted, rtol=0, atol=1e-6)


# -- what cannot be, and what is said ---------------------------------------------------------------------------------------


def sharing(first: str, second: str) -> OptimWrapperDict:
    """Two members that step the same part."""
    model = Gan()
    optimizers = [sgd([{'params': [*model.g.trained, *more], 'lr': 0.25}]) for more in ([], model.d.trained)]
    one = AmpOptimWrapper(opt_level=first, optimizer=optimizers[0], verbosity=0)
    return OptimWrapperDict(a=one, b=AmpOptimWrapper(opt_level=second, optimizer=optimizers[1], verbosity=0))


@pytest.mark.parametrize('levels', [('O2', 'O5'), ('O0', 'O2'), ('O2', 'O3'), ('O0', 'O0'), ('O2', 'O2'), ('O5', 'O5')])
def test_parameters_of_two_optimizers_are_refused(levels: Any) -> None:
    with pytest.raises(AmpAttachError, match='two optimizers'):
        sharing(*levels)


def test_parameters_around_a_part_of_another_member_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 1))
    inside = list(model[1].out_proj.parameters())
    around = [parameter for parameter in model.parameters() if all(parameter is not each for each in inside)]
    ours = [
        AmpOptimWrapper(opt_level='O2', optimizer=sgd([{'params': params, 'lr': 0.1}])) for params in (inside, around)
    ]
    OptimWrapperDict(a=ours[0], b=ours[1])
    with pytest.raises(AmpAttachError, match='parameters of its own around'), ours[0].optim_context(model):
        pass


@pytest.mark.parametrize('level', ['O0', 'O2', 'O4'])
def test_wrapper_of_mmengine_in_the_same_dict_is_refused(level: str) -> None:
    """Gradients that its loss brings to the parameters of ours carry no scale."""
    model = Gan()
    ours = AmpOptimWrapper(opt_level=level, optimizer=sgd([{'params': model.g.trained, 'lr': 0.25}]), loss_scale=8.0)
    theirs = OptimWrapper(sgd([{'params': model.d.trained, 'lr': 0.25}]))
    with pytest.raises(AmpAttachError, match='opt_level'):
        OptimWrapperDict(g=ours, d=theirs)


def test_member_without_a_scale_beside_float16_is_warned_of(log: list[str]) -> None:
    for levels, scale, warned in ((('O0', 'O2'), None, True), (('O5', 'O1'), None, True), (('O0', 'O2'), 8.0, False)):
        log.clear()
        Training(levels, verbosity=1, loss_scale=scale)
        assert any('g has no loss scale' in line and 'through d' in line for line in log) is warned


def test_lines_about_members_have_their_names(log: list[str]) -> None:
    run = Training(('O2', 'O2'), verbosity=1).play('d* D')
    assert any('amp: d: non-finite gradients' in line for line in log)
    log.clear()
    run.wrappers.load_state_dict(run.wrappers.state_dict())
    assert any('amp: g: ' in line for line in log) and any('amp: d: ' in line for line in log)
