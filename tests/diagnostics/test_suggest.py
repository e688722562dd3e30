"""``amp.suggest_level`` on models with a known answer; it changes nothing, can be interrupted, refuses what it cannot try."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bits import differences, same_bits
from mmengine.optim import build_optim_wrapper
from pairs import pairs
from planted_overflows import Act, Fault
from torch import Tensor, nn

from amp_wrapper import AmpError, AmpOptimWrapper, FusedAdamW, FusedSGD, LevelSuggestion, amp

Batch = tuple[Tensor, Tensor]
STEPS = 4
F16, BF16 = torch.float16, torch.bfloat16


# -- models of which it is known which level suits them ---------------------------------------------------------------


class Attention(nn.Module):
    """Its logits are ``factor ** 2`` times as large as need be: for a large factor beyond float16, never beyond bfloat16.

    The least number of FP32 masks them, from a module of its own.
    """

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        least = torch.finfo(torch.float32).min
        self.qkv, self.out, self.factor = nn.Linear(width, 3 * width), nn.Linear(width, width), factor
        self.mask = Fault(lambda x: torch.full((6, 6), least).triu(1).to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = (q * self.factor) @ (k * self.factor).transpose(-1, -2)
        return self.out((logits / self.factor**2 + self.mask(x)).softmax(-1) @ v)


class OverflowingFormer(nn.Module):
    """Three blocks; the attention of those in ``large`` overflows in float16."""

    def __init__(self, large: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        factors = [300.0 if index in large else 1.0 for index in range(3)]
        blocks = [nn.ModuleDict({'attn': Attention(16, factor), 'mlp': nn.Linear(16, 16)}) for factor in factors]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block['attn'](x)
            x = x + block['mlp'](x)
        return self.head(x.mean(1))


class TinyGradientHead(nn.Module):
    """The gradients of ``aux`` are below ``2 ** -25``, which is zero in float16 without a loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head, self.aux = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return self.head(features), self.aux(features.detach())


class Plain(nn.Module):
    """Nothing is the matter with it, unless something is done in its middle."""

    def __init__(self, middle: Act = lambda x: x, dropout: float = 0.0) -> None:
        super().__init__()
        layers = [nn.BatchNorm1d(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
        self.net, self.head, self.middle = nn.Sequential(*layers, nn.Dropout(dropout)), nn.Linear(16, 4), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.net(x)))


def overflow_and_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), Fault(lambda x: x * 1e6 / 1e6), nn.BatchNorm1d(16), nn.Linear(16, 4))


class Positions(Plain):
    """Weights of its own, in no submodule, that float16 cannot hold; and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.full((1, 8), 1e5))
        self.phases = nn.Parameter(torch.ones(16, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions * 1e-5) * self.phases.abs().mean()


def less_accurate(x: Tensor) -> Tensor:
    """bfloat16 has steps of 4 around 1000."""
    return (x + 1000.0) - 1000.0


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_with_aux(model: nn.Module, batch: Batch) -> Tensor:
    logits, aux = model(batch[0])
    return F.cross_entropy(logits, batch[1]) + aux.float().square().mean() * 2.0**-22


def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """It needs the graph wherever it is computed."""
    images = batch[0].clone().requires_grad_()
    scores = model(images).float()
    (gradient,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
    return F.cross_entropy(scores, batch[1]) + gradient.float().square().sum()


def times(factor: float) -> Callable[[nn.Module, Batch], Tensor]:
    return lambda model, batch: cross_entropy(model, batch) * factor


def batches(count: int, *shape: int) -> list[Batch]:
    """Labels that can be learned."""
    generator = torch.Generator().manual_seed(1)
    found: list[Any] = []
    for _ in range(count):
        labels = torch.randint(4, (32,), generator=generator)
        found.append(((torch.randn(*shape, 32, generator=generator) + labels * 0.7).movedim(-1, 0), labels))
    return found


def suggest(model: nn.Module, loss_fn: Any = cross_entropy, shape: Any = (8,), **words: Any) -> LevelSuggestion:
    words = {'steps': STEPS, 'progress': False, 'prefer': 'memory', **words}
    return amp.suggest_level(model, loss_fn, batches(STEPS, *shape), **words)


def entry(found: LevelSuggestion, level: str) -> dict[str, Any]:
    return next(each for each in found.data['levels'] if each['level'] == level)


def against(found: LevelSuggestion, level: str) -> str:
    """Why a level does not suit; '' where it does."""
    return ' '.join(text for _, text in entry(found, level)['reasons'])


# -- known answers ---------------------------------------------------------------------------------------------------


def failing(dtype: torch.dtype, error: Exception) -> nn.Module:
    """A model that cannot run in a type."""

    def act(x: Tensor) -> Tensor:
        if x.dtype is dtype:
            raise error
        return x

    return Plain(act)


def off_in_16_bits(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model, batch) + (model.head.weight.dtype is F16)


def less_in_16_bits(x: Tensor) -> Tensor:
    return x * (1.0 if x.dtype is torch.float32 else 1e-3)


Answer = tuple[Callable[[], nn.Module], dict[str, Any], str, tuple[str, ...], dict[str, str]]


def answer(make: Any, levels: str, level: str, keep: str = '', unsuited: Any = None, **words: Any) -> Answer:
    """A model, levels to try; the level and the module in FP32 that are recommended; the word against others."""
    return make, {'levels': levels.split(), **words}, level, (keep,) if keep else (), unsuited or {}


TINY_RATE = {'make_optimizer': lambda model: FusedSGD(model.parameters(), lr=1e-11)}
# no update of it is lost in 16 bits
LARGE_RATE = {'make_optimizer': lambda model: FusedAdamW(model.parameters(), lr=0.05)}
ADAMW = {'make_optimizer': lambda model: torch.optim.AdamW(model.parameters())}
FORMER: dict[str, Any] = {'shape': (6, 8)}
VANISHING = {'O3': '100 % of the gradient of aux (Linear) becomes zero'}
NOT_IN_ATTENTION = {'O2': 'forward pass, in blocks.1.attn (Attention)'}
KNOWN = {
    'overflow in float16': answer(OverflowingFormer, 'O0 O2 O5', 'O5', '', NOT_IN_ATTENTION, **FORMER),
    'no bfloat16': answer(OverflowingFormer, 'O0 O1 O2', 'O2', 'blocks.1.attn', {'O1': 'forward pass'}, **FORMER),
    'all of a class': answer(lambda: OverflowingFormer((0, 1, 2)), 'O2', 'O2', 'Attention', **FORMER),
    'gradients vanish': answer(TinyGradientHead, 'O2 O3', 'O2', '', VANISHING, loss_fn=loss_with_aux),
    'nothing is the matter': answer(Plain, 'O0 O1 O2 O3 O4 O5', 'O5', **LARGE_RATE),
    'scale that falls to nothing': answer(Plain, 'O2 O5', 'O5', '', {'O2': 'scale'}, loss_fn=times(1e9), **TINY_RATE),
    'mask': answer(lambda: OverflowingFormer(()), 'O2 O5', 'O5', **FORMER),
    'other error': answer(lambda: failing(BF16, KeyError('bfloat16')), 'O2 O5', 'O2', '', {'O5': 'KeyError'}),
    'no memory in FP32': answer(lambda: failing(torch.float32, torch.OutOfMemoryError('')), 'O0 O5', 'O5'),
    'no memory': answer(lambda: failing(F16, torch.OutOfMemoryError('')), 'O2 O5', 'O5', '', {'O2': 'memory'}),
    'weights of the model itself': answer(Positions, 'O2 O5', 'O5', '', {'O2': 'use bfloat16'}, **ADAMW),
    'loss of gradients': answer(lambda: nn.Linear(8, 4), 'O5', 'O5', loss_fn=gradient_penalty),
    'loss that is another one in 16 bits': answer(lambda: Plain(less_in_16_bits), 'O0 O2', 'O0', '', {'O2': 'FP32'}),
    'batch norm behind it': answer(overflow_and_norm, 'O2', 'O2', '1', {'O2': 'pass, in 1 (Fault)'}, **TINY_RATE),
    'loss that is off': answer(Plain, 'O0 O2', 'O0', '', {'O2': 'off that of FP32'}, loss_fn=off_in_16_bits),
    'less than a tenth is saved': answer(Plain, 'O0 O5', 'O0', keep_fp32=['net', 'head']),
    'nothing else was asked for': answer(Plain, 'O5', 'O5', keep_fp32=['net', 'head']),
}


@pytest.mark.parametrize('name', KNOWN)
def test_known_answer(name: str) -> None:
    make, words, level, keep, unsuited = KNOWN[name]
    found = suggest(make(), **words)
    assert (found.level, found.keep_fp32) == (level, keep), str(found)
    if level == 'O0':
        assert ('no other level that was tried suits' if unsuited else 'saves a tenth') in found.reason
    tried = {each['level'] for each in found.data['levels']}
    # of a level that modules in FP32 have mended, the entry without them comes first
    for other in tried - {'O0', 'O3', level if keep else ''} | unsuited.keys():
        assert bool(against(found, other)) == (other in unsuited), other
        assert unsuited.get(other, '') in against(found, other)


@pytest.mark.parametrize('level', ['O3', 'O5'])
def test_inaccurate_modules_and_levels_without_masters_are_not_mended(level: str) -> None:
    """O3 is recommended if it alone was asked for, a level whose gradients are far off not at all."""
    inside = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), Fault(less_accurate), nn.Linear(16, 4))
    found = suggest(inside if level == 'O5' else Plain(), levels=['O0', level], **LARGE_RATE)
    assert (found.level, found.keep_fp32) == ('O0', ())


def test_errors_of_gradients_follow_the_type_and_no_loss_scale() -> None:
    errors = {}
    for factor in (1.0, 1e4):
        # FP32 sums have no loss scale
        words = {'levels': ['O0', 'O1', 'O2', 'O4', 'O5'], 'accumulate_in_fp32': factor > 1, **TINY_RATE}
        found = suggest(Plain(dropout=0.5), times(factor), **words)

        errors[factor] = {level: entry(found, level)['error'] for level in ('O1', 'O2', 'O4', 'O5')}
        assert entry(found, 'O0')['error'] is None
        for level, error in errors[factor].items():
            assert 1e-4 < error < 0.02 if level in ('O1', 'O2') else 1e-3 < error < 0.1
        # 8 bits of bfloat16 against 11 of float16
        assert errors[factor]['O2'] < errors[factor]['O5']
        assert entry(found, 'O0')['memory_ratio'] == 1
        assert all(entry(found, level)['memory_ratio'] < 0.9 for level in errors[factor])
    assert errors[1e4] == pytest.approx(errors[1.0], rel=0.5)


def test_slower_levels_do_not_suit_where_speed_is_preferred() -> None:
    def slow(x: Tensor) -> Tensor:
        # each level casts the input of what it runs in 16 bits
        if x.dtype is BF16:
            time.sleep(0.05)
        return x

    for prefer, level in (('speed', 'O0'), ('memory', 'O5')):
        found = suggest(Plain(slow), levels=['O0', 'O5'], prefer=prefer)
        assert found.level == level and entry(found, 'O5')['time'] > 1.1
        assert ('times as long' in against(found, 'O5')) == (prefer == 'speed')


def test_error_at_a_later_step_is_no_matter_of_the_loss_scale() -> None:
    for kind, words in (('cannot', 'index out of range'), ('loss', 'the loss at step')):
        calls = itertools.count()

        def loss_fn(model: nn.Module, batch: Batch, kind: str = kind, calls: Iterator[int] = calls) -> Tensor:
            is_late = model.head.weight.dtype is BF16 and next(calls) >= 2
            if is_late and kind == 'cannot':
                raise IndexError('index out of range')
            return cross_entropy(model, batch) * (torch.nan if is_late else 1.0)

        found = suggest(Plain(), loss_fn, levels=['O0', 'O5'])
        assert found.level == 'O0' and words in against(found, 'O5')
        assert entry(found, 'O5')['reasons'][0][0] == kind and len(entry(found, 'O5')['losses']) < STEPS


# -- it changes nothing ----------------------------------------------------------------------------------------------


def snapshot(model: nn.Module, data: Any) -> dict[str, Any]:
    return {
        'weights': copy.deepcopy(model.state_dict()),
        'gradients': [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        'modes': [module.training for module in model.modules()],
        'random': [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        'data': copy.deepcopy(data),
        'grad mode': torch.is_grad_enabled(),
    }


def careless(model: nn.Module, batch: Batch) -> Tensor:
    """Draws random numbers, and writes to its batch and to buffers."""
    batch[0].add_(torch.randn(()) * 0.01 + random.random() * 0.01 + float(np.random.randn()) * 0.01)
    return cross_entropy(model, batch)


TOOLS = ('report', 'suggest', 'interrupted')


@pairs(attached=['', 'O2', 'O3', 'O4'], level=['O0', 'O2', 'O5'], tool=TOOLS, training=[True, False])
def test_nothing_is_changed(attached: str, level: Any, tool: str, training: bool) -> None:
    model: Any = Plain(dropout=0.3).train(training)
    data = batches(STEPS, 8)
    masters: list[Tensor] = []
    if attached:
        optimizer: Any = FusedAdamW(model.parameters(), lr=1e-3)
        model, optimizer = amp.initialize(model, optimizer, opt_level=attached, verbosity=0)
        with amp.scale_loss(cross_entropy(model, data[0]), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        masters = list(amp.master_params(optimizer))
    cross_entropy(model, data[0]).backward()
    model.net[0].eval()
    before, calls = [snapshot(model, data), copy.deepcopy(masters)], itertools.count()

    def loss_fn(copied: nn.Module, batch: Batch) -> Tensor:
        loss = careless(copied, batch)
        if tool == 'interrupted' and next(calls) == 9:
            raise KeyboardInterrupt
        return loss

    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        if tool == 'report':
            report = amp.report(model, data[0], level, loss_fn)
            assert report.data['mode'] == ('training' if training else 'evaluation')
        else:
            found = amp.suggest_level(model, loss_fn, data, levels=[level, 'O1'], steps=STEPS, progress=False)
            assert found.data['interrupted'] == (tool == 'interrupted')
        assert torch.is_autocast_enabled('cpu') and not torch.is_grad_enabled()
    assert differences(before, [snapshot(model, data), masters]) == []
    if attached == 'O2':
        assert all(same_bits(a.to(b.dtype), b) for a, b in zip(masters, model.parameters(), strict=True))


def test_same_call_gives_the_same_numbers_and_names_without_wrappers() -> None:
    torch.manual_seed(3)
    model = Plain(dropout=0.3)
    results = []
    for seed, wrap in ((0, nn.DataParallel), (0, torch.compile), (1, nn.DataParallel)):
        levels = suggest(wrap(model), levels=['O5'], seed=seed, keep_fp32=['head']).data['levels']
        results.append(repr([(each['losses'], each['error']) for each in levels]))
        torch.manual_seed(4)
    assert results[0] == results[1] != results[2]


# -- interruptions ---------------------------------------------------------------------------------------------------


def test_interruption_keeps_what_is_known() -> None:
    def interrupted_after(left: int) -> tuple[LevelSuggestion, int]:
        calls = itertools.count(1)

        def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
            if next(calls) > left:
                raise KeyboardInterrupt
            return cross_entropy(model, batch)

        return suggest(Plain(), loss_fn, levels=['O4', 'O5']), next(calls) - 1

    found, calls = interrupted_after(10**6)
    assert (found.level, found.data['interrupted']) == ('O5', False)
    # in FP32, and when that has run
    for left in (3, STEPS + 3):
        early, _ = interrupted_after(left)
        assert (early.level, early.data['not_tried']) == (None, ['O4', 'O5'])
    assert (early.level, early.data['not_tried']) == (None, ['O4', 'O5'])
    assert early.reason.startswith('Interrupted; not tried: O4, O5.')
    assert early.config == early.script == '# no level'
    assert 'not tried' in str(early) and 'No level' in early.html()
    late, _ = interrupted_after(calls - 1)
    assert late.data['interrupted'] and late.level in ('O4', 'O5') and late.reason.startswith('Interrupted')


# -- memory ----------------------------------------------------------------------------------------------------------


def test_bytes_by_level_counted_by_hand() -> None:
    model = nn.Linear(4, 3, bias=False)
    model.register_buffer('count', torch.zeros((), dtype=torch.int64))
    model.register_buffer('view_of_it', model.count.view(1))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x.requires_grad_()), torch.zeros(2, 3))

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters())

    found = amp.suggest_level(model, loss_fn, [torch.ones(2, 4)], adam, steps=STEPS, progress=False)
    for level in ('O0', 'O1', 'O2', 'O3', 'O4', 'O5'):
        is_cast = level in ('O2', 'O3', 'O5')
        # 12 weights with a gradient each, and masters. Adam has two numbers for each, and a float32 step. A count of 8 bytes
        masters, moments = 48 * (level in ('O2', 'O5')), 48 if level == 'O3' else 96
        held = 2 * (24 if is_cast else 48) + masters + 4 + moments + 8
        # Kept for the backward pass: 8 inputs of the layer, in its type; 6 outputs and 6 targets of the loss, in FP32. Weights
        # are there anyway, casts of them are not.
        kept = 48 + {'O0': 32, 'O1': 16 + 24, 'O4': 16 + 24}.get(level, 16)
        assert entry(found, level)['memory'] == held + kept, level


def test_sparse_gradients_are_compared() -> None:
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))
    words: Any = dict(steps=4, progress=False, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1))
    assert amp.suggest_level(model, lambda net, x: net(x).float().square().sum(), [torch.tensor([1, 1])], **words).level


# -- the result ------------------------------------------------------------------------------------------------------


def test_overrides_hold_for_every_level_that_can_have_them() -> None:
    found = suggest(Plain(), levels=['O4', 'O5'], master_weights='split', keep_fp32=['head'])
    assert found.level == 'O5' and "master_weights='split' conflicts" in against(found, 'O4')
    assert found.script == (
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O5', keep_fp32=['head'], master_weights='split')"
    )


def test_result_as_text_page_data_and_lines_that_work() -> None:
    found = suggest(OverflowingFormer(), **FORMER, levels=['O0', 'O2'], keep_fp32='embed')
    # lines are as long as the terminal is wide
    text, page = ' '.join(str(found).split()), found.html()
    for part in (found.reason, found.config, found.script, 'recommended', "O2 keep_fp32=['blocks.1.attn']"):
        assert part in text
    assert 'Recommended level: O2' in page and 'blocks.1.attn' in page
    assert not [word for word in ('http', 'src=', 'url(') if word in page]
    assert json.loads(json.dumps(found.data, default=str))['level'] == 'O2'
    assert found.data['optimizer'] == 'FusedAdamW with a learning rate of 0.001, since none was given'
    names: dict[str, Any] = {}
    exec(found.config, names)
    sgd = dict(type='SGD', lr=0.1)
    wrapper = build_optim_wrapper(OverflowingFormer(), {**names['optim_wrapper'], 'optimizer': sgd})
    assert isinstance(wrapper, AmpOptimWrapper)
    model = OverflowingFormer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(found.script.replace(')', ', verbosity=0)'), {'amp': amp, 'model': model, 'optimizer': optimizer})
    assert model.head.weight.dtype is torch.float16
    assert model.blocks[1]['attn'].out.weight.dtype is model.embed.weight.dtype is torch.float32


# -- refusals --------------------------------------------------------------------------------------------------------

DATA = batches(2, 8)


class Broken:
    def __iter__(self) -> Any:
        raise TypeError('worker 0 cannot\npickle this')


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({'levels': value}, 'levels=') for value in (['O7'], [], 5)),
    *(({'steps': value}, f'steps={value}') for value in (3, 4.5, True)),
    ({'prefer': 'beauty'}, "prefer='beauty'"),
    ({'seed': 'zero'}, "seed='zero'"),
    ({'make_optimizer': torch.optim.SGD}, "SGD'> must be a function"),
    ({'kep_fp32': ['head']}, "kep_fp32=... is no option (did you mean 'keep_fp32'?)"),
    ({'keep_fp32': ['hed']}, "keep_fp32='hed' matches no module (did you mean 'head'?)"),
    ({'fp32_ops': ['torch.nn.GRU']}, "fp32_ops='torch.nn.GRU' matches no module"),
    ({'num_losses': 2}, 'num_losses=2'),
    ({'levels': ['O1'], 'master_weights': True}, 'master_weights=True conflicts'),
    ({'model': 3}, 'model=int'),
    ({'model': nn.ReLU()}, 'model=ReLU must be'),
    ({'loss_fn': None}, 'loss_fn=None'),
    *(({'batches': value}, f'batches={type(value).__name__}') for value in (3, {'x': 1}, 'batches', None)),
    ({'batches': []}, 'batches is empty'),
    ({'batches': Broken()}, 'batches=Broken cannot be read (TypeError: worker 0 cannot pickle this)'),
    ({'loss_fn': lambda model, batch: model(batch[0])}, 'a tensor of shape (32, 4)'),
    ({'loss_fn': times(float('nan'))}, 'the loss at step 1 is nan in FP32'),
    (
        {'loss_fn': cross_entropy, 'batches': [DATA[0], (DATA[0][0] * torch.nan, DATA[0][1])]},
        'the loss at step 2 is nan in FP32',
    ),
    ({'loss_fn': lambda model, batch: cross_entropy(model, batch).detach()}, 'gives the model no gradient'),
    ({'levels': [['O1']]}, "levels=[['O1']]"),
    ({'loss_fn': cross_entropy, 'make_optimizer': lambda model: None}, 'gave None'),
]


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError

    for words, text in REFUSED:
        with pytest.raises(AmpError, match=re.escape(text)):
            amp.suggest_level(**{'model': Plain(), 'loss_fn': loss_fn, 'batches': DATA, 'progress': False, **words})


def test_loss_of_another_model_is_refused_and_leaves_it_alone() -> None:
    model = Plain()
    before = snapshot(model, None)
    with pytest.raises(AmpError, match='of the original was called, not that of the copy'):
        suggest(model, lambda _, batch: cross_entropy(model, batch))
    assert differences(before, snapshot(model, None)) == []
