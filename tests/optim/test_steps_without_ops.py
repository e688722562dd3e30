"""Without a compiled library the fused optimizers take torch's own fused step, and its numbers and files are the library's."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_wrapper import AmpOptimWrapper, AmpUsageError, FusedAdam, FusedAdamW, FusedSGD, amp, ops
from amp_wrapper.ops import loader
from amp_wrapper.optim import Update

Switch = Callable[[bool], None]
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    'adamw': lambda p: FusedAdamW(p, lr=0.01, weight_decay=0.1),
    'adam': lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True),
    'sgd': lambda p: FusedSGD(p, lr=0.1, momentum=0.9, nesterov=True),
    'dampened': lambda p: FusedSGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1, maximize=True),
}
kinds = pytest.mark.parametrize('kind', KINDS)
#: Level and what else is set; each with both ways to train.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ('O0', {}),
    ('O1', {}),
    ('O2', {}),
    ('O2', dict(master_weights='split')),
    ('O3', {}),
    ('O4', {}),
    ('O5', {}),
    ('O5', dict(master_weights='split')),
]
settings = pytest.mark.parametrize(
    ('level', 'words'), SETTINGS, ids=['-'.join((level, *words)) for level, words in SETTINGS]
)


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Puts the library away, and brings it back."""

    def put(away: bool) -> None:
        monkeypatch.setenv('AMP_WRAPPER_OPS', str(tmp_path)) if away else monkeypatch.undo()
        loader.library.cache_clear()

    yield put
    put(away=False)


class OpCount(TorchDispatchMode):
    """Counts what is computed, and notes the types of the tensors of each fused step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.types: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split('.')[0]
        self.calls[name] += 1
        if name.startswith('_fused_'):
            # the steps of Adam are float32 always
            self.types.append({tensor.dtype for tensors in args[:3] for tensor in tensors})
        return func(*args, **(kwargs or {}))


class Training:
    """A small model, trained through ``amp`` or the wrapper, with a norm that is clipped."""

    def __init__(self, api: str, level: str, kind: str, device: torch.device, depth: int = 1, **words: Any) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.Tanh())]
        self.model: Any = nn.Sequential(nn.Conv1d(1, 4, 1), nn.Flatten(), nn.BatchNorm1d(16), *layers).to(device)
        self.optimizer = KINDS[kind](self.model.parameters())
        self.api, self.device = api, device
        if api == 'amp':
            amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, **words)
            return
        more = (
            dict(loss_scale=dict(init_scale=2.0**8, growth_interval=2)) if level == 'O2' else dict(skip_nonfinite=True)
        )
        self.wrapper = AmpOptimWrapper(
            optimizer=self.optimizer, opt_level=level, clip_grad=dict(max_norm=0.05), verbosity=0, **words, **more
        )

    def run(self, *indices: int, bad: int = -1, within: Any = None) -> None:
        within = within or contextlib.nullcontext()
        for index in indices:
            x = torch.randn(8, 1, 4, generator=torch.Generator().manual_seed(index)).to(self.device)
            factor = math.inf if index == bad else 1.0
            if self.api == 'amp':
                with amp.scale_loss(self.model(x).float().square().mean() * factor, self.optimizer) as scaled:
                    scaled.backward()
                with within:
                    self.optimizer.step()
                self.optimizer.zero_grad()
            else:
                with self.wrapper.optim_context(self.model):
                    loss = self.model(x).float().square().mean() * factor
                self.wrapper.backward(loss)
                with within:
                    self.wrapper.step()
                self.wrapper.zero_grad()

    def saved(self) -> dict[str, Any]:
        return copy.deepcopy(dict(model=self.model.state_dict(), wrapper=self.wrapper.state_dict()))


def agree(one: Any, other: Any, path: str = '') -> None:
    """Equal but for the last places of numbers; names, types, shapes and counts are the same."""
    if isinstance(one, dict):
        assert list(one) == list(other), path
        for key, value in one.items():
            agree(value, other[key], f'{path}.{key}')
    elif isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        if path.endswith('step') or not one.is_floating_point():
            # an int16 remainder has no last places: it goes round with its weight
            assert one.dtype is torch.int16 or torch.equal(one, other), path
        else:
            half = one.dtype in (torch.float16, torch.bfloat16)
            torch.testing.assert_close(one, other, rtol=2e-2 if half else 1e-3, atol=2e-3 if half else 1e-4, msg=path)
    elif isinstance(one, (list, tuple)):
        agree(dict(enumerate(one)), dict(enumerate(other)), path)


@pytest.mark.parametrize('away', [False, True])
@kinds
def test_all_types_in_one_group(kind: str, away: bool, device: torch.device, switch: Switch) -> None:
    """As each in a group of its own; torch's kernels for GPUs take one type at a time."""
    switch(away)
    types = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16)
    together = [nn.Parameter(torch.ones(5, dtype=dtype, device=device)) for dtype in types * 2]
    apart = [nn.Parameter(p.detach().clone()) for p in together]
    optimizers = KINDS[kind](together), KINDS[kind]([dict(params=[p]) for p in apart])
    for step in range(3):
        for p, q in zip(together, apart):
            p.grad, q.grad = torch.full_like(p, step + 0.5), torch.full_like(q, step + 0.5)
        with OpCount() as count:
            for optimizer in optimizers:
                optimizer.step()
        assert count.types and all(len(types) == 1 for types in count.types)
    assert all(torch.equal(p, q) and not torch.equal(p, torch.ones_like(p)) for p, q in zip(together, apart))


@pytest.mark.parametrize('api', ['amp', 'wrapper'])
@settings
@kinds
def test_a_step_is_one_call_of_torchs_fused_function(
    level: str, words: dict[str, Any], api: str, kind: str, device: torch.device, switch: Switch
) -> None:
    """However many parameters there are: a step in Python made more than a hundred ops for each."""
    if words and api == 'amp':
        pytest.skip('split masters belong to the wrapper')
    switch(True)
    counts = []
    for depth in (2, 12):
        training, counter = Training(api, level, kind, device, depth, **words), OpCount()
        training.run(0)
        training.run(1, within=counter)
        function = {'adamw': '_fused_adamw_', 'adam': '_fused_adam_'}.get(kind, '_fused_sgd_')
        # 16-bit weights and those that stay float32 are a call each
        assert 1 <= counter.calls[function] <= 2
        counts.append(sum(counter.calls.values()))
    # of the 20 that are more, each is checked and widened, and some are taken apart
    assert words or (counts[1] - counts[0]) / 20 < 15, counts


@pytest.mark.parametrize('first', [True, False], ids=['without-then-with', 'with-then-without'])
@settings
@kinds
def test_a_run_goes_on_with_the_library_and_without_it(
    level: str, words: dict[str, Any], kind: str, first: bool, device: torch.device, switch: Switch
) -> None:
    through = Training('wrapper', level, kind, device, **words)
    through.run(0, 1, 2, bad=0)
    middle = through.saved()
    through.run(3, 4, 5, bad=4)
    end = through.saved()
    switch(first)
    changed = Training('wrapper', level, kind, device, **words)
    changed.run(0, 1, 2, bad=0)
    saved = changed.saved()
    agree(saved, middle)
    switch(not first)
    resumed = Training('wrapper', level, kind, device, **words)
    # masters and 16-bit weights are there before they are loaded
    resumed.run(7)
    resumed.model.load_state_dict(saved['model'])
    resumed.wrapper.load_state_dict(saved['wrapper'])
    resumed.run(3, 4, 5, bad=4)
    agree(resumed.saved(), end)


@settings
@kinds
def test_a_skipped_step_changes_no_bit(
    level: str, words: dict[str, Any], kind: str, device: torch.device, switch: Switch
) -> None:
    switch(True)
    training = Training('wrapper', level, kind, device, **words)
    training.run(0, 1)
    tensors = [*training.model.parameters(), *(p for g in training.optimizer.param_groups for p in g['params'])]
    tensors += [value for state in training.optimizer.state.values() for value in state.values()]
    before = [tensor.detach().clone() for tensor in tensors]
    training.run(2, bad=2)
    assert all(map(same_bits, before, (tensor.detach() for tensor in tensors)))
    training.run(3)
    assert not all(map(same_bits, before, (tensor.detach() for tensor in tensors)))


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
@kinds
def test_layouts_may_change_between_steps(kind: str, dtype: torch.dtype, device: torch.device, switch: Switch) -> None:
    """torch's functions walk through memory: elements of a weight, its gradient and its moments must lie in one order."""
    switch(True)
    ours, plain = (nn.Parameter(torch.linspace(-1, 1, 48, device=device).view(2, 4, 2, 3).to(dtype)) for _ in range(2))
    assert not ops.compiled_devices()
    optimizers = [KINDS[kind]([parameter]) for parameter in (ours, plain)]
    forms: list[Callable[[Tensor], Tensor]] = [
        lambda t: t,
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: torch._neg_view(-t),
    ]
    for index, (weight_form, gradient_form) in enumerate((w, g) for w in forms[:3] for g in forms):
        ours.grad = plain.grad = None
        ours.data = weight_form(ours.data)
        gradient = torch.randn(plain.shape, generator=torch.Generator().manual_seed(index)).to(plain)
        ours.grad, plain.grad = gradient_form(gradient), gradient
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures('with_and_without_ops')
def test_a_skipped_step_leaves_a_master_in_the_middle_between_two_weights(device: torch.device) -> None:
    """Its 16-bit weight is the upper of the two, where rounding to nearest-even would give the lower."""
    model = nn.Linear(2, 2, bias=False).to(device)
    model.weight.data.fill_(1 + 2**-8)
    wrapper = AmpOptimWrapper(
        optimizer=FusedSGD(model.parameters(), lr=0.1),
        opt_level='O5',
        master_weights='split',
        skip_nonfinite=True,
        verbosity=0,
    )
    with wrapper.optim_context(model):
        loss = model(torch.ones(1, 2, device=device)).float().sum() * math.inf
    wrapper.update_params(loss)
    assert model.weight.dtype is torch.bfloat16 and bool((model.weight == 1 + 2**-7).all())


@pytest.mark.usefixtures('with_and_without_ops')
def test_parameters_of_two_groups_that_share_memory_are_refused(device: torch.device) -> None:
    storage = torch.ones(8, device=device)
    mine = [nn.Parameter(storage[:6]), nn.Parameter(storage[2:])]
    optimizer = FusedAdamW([dict(params=[parameter]) for parameter in mine])
    for parameter in mine:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(AmpUsageError, match='share memory'):
        optimizer.step()
    assert not optimizer.state and bool((storage == 1).all())


@pytest.mark.usefixtures('with_and_without_ops')
def test_gradients_take_turns_among_parameters_of_one_shape(device: torch.device) -> None:
    mine = [nn.Parameter(torch.ones(2, device=device)) for _ in range(3)]
    optimizer = FusedAdamW(mine, weight_decay=0.0)
    for index in (0, 1, 2, 1):
        for parameter in mine:
            parameter.grad = torch.ones_like(parameter) if parameter is mine[index] else None
        optimizer.step()
    assert [int(optimizer.state[parameter]['step']) for parameter in mine] == [1, 2, 1]


@pytest.mark.usefixtures('with_and_without_ops')
def test_a_step_that_nothing_is_said_about_is_taken_as_it_is(device: torch.device) -> None:
    weight = nn.Parameter(torch.ones(2, device=device))
    optimizer, update = FusedSGD([weight], lr=0.5), Update([torch.ones_like(weight)], [None], lambda _: {})
    with optimizer.updating(update):
        optimizer.step()
    assert update.decision is not None and weight.tolist() == [0.5, 0.5]
    assert list(map(str, update.decision.tolist())) == '0.0 1.0 1.0 inf nan nan 0.0 0.0'.split()


@pytest.mark.parametrize('groups', [1, 2])
@kinds
def test_what_has_changed_since_the_last_step_is_seen(
    kind: str, groups: int, device: torch.device, switch: Switch
) -> None:
    """What no step can be taken with is told before one is; everything else is stepped as by an optimizer that begins there."""
    switch(True)

    def build() -> tuple[list[nn.Parameter], Any]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3, 2, device=device)) for _ in range(2)]
        split = [{'params': [p]} for p in parameters] if groups == 2 else parameters
        optimizer = KINDS[kind](split)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return parameters, optimizer

    parameters, optimizer = build()
    before = copy.deepcopy((parameters, optimizer.state_dict()))
    for spoil, text in (
        (lambda p: setattr(p, 'grad', torch.ones_like(p).to_sparse()), 'sparse gradient'),
        (lambda p: setattr(p, 'data', torch.ones(4, 2, device=device)), 'gradient'),
    ):
        parameters, optimizer = build()
        spoil(parameters[0])
        with pytest.raises(AmpUsageError, match=text):
            optimizer.step()
        assert same_bits(parameters[1], before[0][1])
    for dtype in (torch.float64, torch.bfloat16):
        parameters, optimizer = build()
        for parameter in parameters:
            parameter.data, parameter.grad = parameter.data.to(dtype), None
            parameter.grad = torch.ones_like(parameter)
        other = KINDS[kind](
            [{'params': [p]} for p in copy.deepcopy(parameters)] if groups == 2 else copy.deepcopy(parameters)
        )
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for parameter in (p for group in other.param_groups for p in group['params']):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        other.step()
        theirs = [p for group in other.param_groups for p in group['params']]
        assert all(map(same_bits, parameters, theirs))
