"""``amp.suggest_level`` on models with a known answer; it changes nothing, can be interrupted, refuses what it cannot try."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bits import differences, same_bits
from mmengine.optim import build_optim_wrapper
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toy_levels import (
    OffsetInside,
    OverflowingFormer,
    PlainCNN,
    TinyGradientHead,
    batches,
    cross_entropy,
    loss_with_aux,
)

from amp_wrapper import AmpConfigError, AmpOptimWrapper, AmpUsageError, amp
from amp_wrapper.diagnostics import pages, side_by_side
from amp_wrapper.diagnostics.suggestion import LevelSuggestion
from amp_wrapper.optim import FusedAdamW, FusedSGD
from amp_wrapper.policy import resolve

STEPS = 4


def suggest(
    model: nn.Module, loss_fn: Any = cross_entropy, shape: tuple[int, ...] = (8,), **words: Any
) -> LevelSuggestion:
    words = {'steps': STEPS, 'progress': False, 'prefer': 'memory', **words}
    device = next(model.parameters()).device
    data = [tuple(t.to(device) for t in batch) for batch in batches(STEPS, *shape)]
    return amp.suggest_level(model, loss_fn, data, **words)


def entry(found: LevelSuggestion, level: str, keep: tuple[str, ...] = ()) -> dict[str, Any]:
    return next(each for each in found.data['levels'] if each['level'] == level and each['keep_fp32'] == list(keep))


def kinds(found: LevelSuggestion, level: str) -> list[str]:
    return [reason['kind'] for reason in entry(found, level)['reasons']]


# -- known answers ---------------------------------------------------------------------------------------------------


def test_an_attention_that_overflows_in_float16_gets_bfloat16(device: torch.device) -> None:
    found = suggest(OverflowingFormer().to(device), shape=(6, 8), levels=['O0', 'O2', 'O5'])
    assert (found.level, found.keep_fp32) == ('O5', ())
    assert kinds(found, 'O2') == ['forward']
    assert "'blocks.1.attn' (Attention): its inputs are finite, its outputs are not" in found.reason
    modules = {module['name']: module for module in entry(found, 'O2')['modules']}
    assert modules['blocks.0']['finite']
    assert not modules['blocks.1.attn']['finite']


def test_an_attention_that_overflows_stays_in_fp32_where_bfloat16_is_not_wanted(device: torch.device) -> None:
    found = suggest(OverflowingFormer().to(device), shape=(6, 8), levels=['O0', 'O1', 'O2'])
    assert (found.level, found.keep_fp32) == ('O2', ('blocks.1.attn',))
    assert entry(found, 'O2', ('blocks.1.attn',))['gradients']['error'] < 0.01
    assert kinds(found, 'O1') == ['forward']
    assert found.data['searches']['O2']['trials'][0]['keep_fp32'] == ['blocks.1.attn']


def test_all_of_a_class_are_named_by_their_class() -> None:
    found = suggest(OverflowingFormer(large=(0, 1, 2)), shape=(6, 8), levels=['O2'])
    assert (found.level, found.keep_fp32) == ('O2', ('Attention',))
    assert 'Without any\nsomething was not finite.' in found.html()


def test_gradients_that_vanish_without_a_loss_scale(device: torch.device) -> None:
    found = suggest(TinyGradientHead().to(device), loss_with_aux, levels=['O2', 'O3'])
    assert found.level == 'O2'
    assert 'vanished' in kinds(found, 'O3')
    assert "100 % of the gradient of 'aux' (Linear) becomes zero at a loss scale of 1" in found.reason
    assert entry(found, 'O2')['gradients']['error'] < 0.01


def test_a_plain_cnn_needs_nothing(device: torch.device) -> None:
    found = suggest(PlainCNN().to(device), shape=(1, 8, 8))
    assert (found.level, found.keep_fp32) == ('O5', ())
    assert [each['level'] for each in found.data['levels']] == ['O0', 'O1', 'O2', 'O3', 'O4', 'O5']
    assert all(each['tried'] for each in found.data['levels'])
    assert found.data['searches'] == {}
    for level in ('O1', 'O2', 'O4', 'O5'):
        assert entry(found, level)['memory']['ratio'] < 0.9
        assert not entry(found, level)['reasons']
    # 8 bits of bfloat16 against 11 of float16
    assert entry(found, 'O2')['gradients']['error'] < entry(found, 'O5')['gradients']['error'] < 0.05
    assert entry(found, 'O0')['gradients']['error'] is None


def test_a_module_that_needs_more_digits_is_found_by_bisection(device: torch.device) -> None:
    found = suggest(OffsetInside().to(device), levels=['O0', 'O5'], max_trials=12)
    assert (found.level, found.keep_fp32) == ('O5', ('stem.1',))
    assert 'gradients' in kinds(found, 'O5')
    search = found.data['searches']['O5']
    assert 3 < len(search['trials']) <= 12
    assert search['error_before'] > 0.5 > 0.15 > search['error_after']
    assert 'at most 12 in all' in str(found)


def test_the_search_keeps_to_its_trials() -> None:
    found = suggest(OffsetInside(), levels=['O0', 'O5'], max_trials=1)
    assert (found.level, found.keep_fp32) == ('O0', ())
    assert len(found.data['searches']['O5']['trials']) == 1
    assert 'are used up' in found.data['searches']['O5']['ended']
    none = suggest(OffsetInside(), levels=['O0', 'O5'], max_trials=0)
    assert (none.level, none.data['searches']) == ('O0', {})


def test_updates_that_need_masters(device: torch.device) -> None:
    words: dict[str, Any] = {'shape': (1, 8, 8), 'levels': ['O2', 'O3']}
    small = suggest(PlainCNN().to(device), make_optimizer=lambda m: FusedAdamW(m.parameters(), lr=1e-6), **words)
    assert small.level == 'O2'
    assert kinds(small, 'O3') == ['masters']
    assert small.data['lost_updates']['float16'] > 0.9
    assert small.data['without_masters']['level'] == 'O2'
    large = suggest(PlainCNN().to(device), make_optimizer=lambda m: FusedAdamW(m.parameters(), lr=0.05), **words)
    assert kinds(large, 'O3') == []
    assert large.data['lost_updates']['float16'] < 0.01


def test_a_collapsing_loss_scale() -> None:
    """Gradients of 1e9 are beyond float16 whatever the scale is above 2 ** -14."""
    model = PlainCNN()
    found = suggest(
        model,
        lambda model, batch: cross_entropy(model, batch) * 1e9,
        (1, 8, 8),
        levels=['O2', 'O5'],
        make_optimizer=lambda m: FusedSGD(m.parameters(), lr=1e-11),
    )
    assert found.level == 'O5'
    assert kinds(found, 'O2') == ['scale']
    assert entry(found, 'O2')['skips'] > 16


def test_losses_of_a_level_that_casts_per_op_follow_the_weights() -> None:
    """Casts of weights that outlived a forward pass would leave the loss where it was."""
    model = PlainCNN()
    task = side_by_side.Task(
        model,
        cross_entropy,
        batches(STEPS, 1, 8, 8),
        lambda m: FusedSGD(m.parameters(), lr=0.5),
        0,
        lambda engine, copied: engine.attach(copied),
        surrounds=True,
    )
    plans = [side_by_side.Plan(level, resolve(level)) for level in ('O0', 'O4')]
    runs: dict[str, side_by_side.LevelRun] = {}
    assert side_by_side.train_side_by_side(task, plans, STEPS, runs, lambda name: None)
    assert runs['O4'].losses == pytest.approx(runs['O0'].losses, rel=0.01)
    assert runs['O0'].losses[0] - runs['O0'].losses[-1] > 0.1


# -- it changes nothing ----------------------------------------------------------------------------------------------


def snapshot(model: nn.Module, data: Any) -> dict[str, Any]:
    return {
        'weights': copy.deepcopy(model.state_dict()),
        'gradients': [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        'modes': [module.training for module in model.modules()],
        'hooks': [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        'torch': torch.get_rng_state(),
        'python': random.getstate(),
        'numpy': np.random.get_state()[1].tolist(),
        'data': copy.deepcopy(data),
        'versions': [t._version for t in (*model.parameters(), *model.buffers())],
        'grad mode': torch.is_grad_enabled(),
    }


def careless(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Draws random numbers, and writes to its batch."""
    batch[0].add_(torch.randn(()) * 0.01 + random.random() * 0.01 + float(np.random.rand()) * 0.01)
    return cross_entropy(model, batch)


@pytest.mark.parametrize('interrupted', [False, True])
def test_it_changes_nothing(interrupted: bool) -> None:
    model = PlainCNN(dropout=0.3)
    cross_entropy(model, batches(1, 1, 8, 8)[0]).backward()
    model.net[1].eval()
    data = batches(STEPS, 1, 8, 8)
    before = snapshot(model, data)
    calls = 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss = careless(model, batch)
        if interrupted and calls == 14:
            raise KeyboardInterrupt
        return loss

    found = amp.suggest_level(model, loss_fn, data, levels=['O1', 'O5'], steps=STEPS, progress=False)
    assert found.data['interrupted'] is interrupted
    after = snapshot(model, data)
    assert differences(before, after) == []


def test_a_model_that_is_attached_stays_so() -> None:
    model = PlainCNN()
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level='O2', verbosity=0)
    before = copy.deepcopy(list(amp.master_params(optimizer)))
    assert suggest(model, shape=(1, 8, 8), levels=['O5']).level == 'O5'
    assert model.head.weight.dtype is torch.float16
    assert all(same_bits(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))


@pytest.mark.parametrize('wrap', [torch.compile, nn.DataParallel])
def test_names_are_those_without_wrappers(wrap: Any) -> None:
    found = suggest(wrap(OffsetInside()), levels=['O5'])
    assert found.keep_fp32 == ('stem.1',)


def test_the_same_call_gives_the_same_numbers() -> None:
    torch.manual_seed(3)
    model = PlainCNN(dropout=0.3)

    def numbers(seed: int) -> list[Any]:
        found = suggest(model, shape=(1, 8, 8), levels=['O5'], seed=seed)
        return [(each['loss'], each['gradients'], each['modules']) for each in found.data['levels']]

    first = numbers(0)
    torch.manual_seed(4)
    assert repr(numbers(0)) == repr(first)
    assert repr(numbers(1)) != repr(first)


# -- interruptions ---------------------------------------------------------------------------------------------------


def interrupted_after(calls: int, **words: Any) -> LevelSuggestion:
    left = calls

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return cross_entropy(model, batch)

    return suggest(PlainCNN(), loss_fn, (1, 8, 8), levels=['O4', 'O5'], **words)


def test_an_interruption_before_training_knows_no_level() -> None:
    found = interrupted_after(3)
    assert found.level is None
    assert found.data['not_tried'] == ['O4', 'O5']
    assert found.reason.startswith('Interrupted; not tried: O4, O5.')
    assert 'not tried' in str(found)
    assert found.config == found.script == '# no level'
    assert 'No level' in found.html()


def test_an_interruption_in_training_uses_what_was_measured() -> None:
    # 4 comparisons, 4 steps of O0, O4, O5 and O0 in another order; in the last step the order is turned around
    found = interrupted_after(4 + 3 * 4 + 2)
    assert found.data['interrupted']
    assert found.level == 'O5'
    assert found.data['not_tried'] == []
    assert found.reason.startswith('Interrupted, after every level had taken some steps.')
    assert entry(found, 'O4')['time']['ratio'] > 0


def test_an_interruption_says_which_levels_were_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, 'fit_together', lambda model, copies: False)
    # one after the other: O0 with 4 steps and 4 checks, O4 with as many, O5
    found = interrupted_after(4 + 8 + 8 + 1)
    assert found.data['side_by_side'] is None
    assert found.data['not_tried'] == ['O5']
    assert found.level == 'O4'
    assert [row[-1] for row in found.rows() if row[0] == 'O5'] == ['not tried']


# -- what it tells ---------------------------------------------------------------------------------------------------


def test_one_after_the_other_where_the_memory_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, 'free_memory', lambda device: 1000)
    found = suggest(PlainCNN(), shape=(1, 8, 8), levels=['O5'])
    assert found.level == 'O5'
    assert found.data['side_by_side'] is False
    assert 'one after the other' in str(found)


def test_memory_that_runs_out_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    original = side_by_side._Lane._timed

    def timed(self: Any, batch: Any, saved: Any) -> Any:
        if self.run.name == 'O2':
            raise torch.OutOfMemoryError('out of memory')
        return original(self, batch, saved)

    monkeypatch.setattr(side_by_side._Lane, '_timed', timed)
    found = suggest(PlainCNN(), shape=(1, 8, 8), levels=['O2', 'O5'])
    assert found.level == 'O5'
    assert entry(found, 'O2')['reasons'][0]['text'] == 'there is not enough memory'


def test_an_op_that_a_type_does_not_have_rules_a_level_out() -> None:
    class Picky(PlainCNN):
        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            if out.dtype is torch.bfloat16:
                raise RuntimeError('"picky" not implemented for \'BFloat16\'')
            return self.head(out)

    found = suggest(Picky(), shape=(1, 8, 8), levels=['O2', 'O5'])
    assert found.level == 'O2'
    assert kinds(found, 'O5') == ['cannot']
    assert "not implemented for 'BFloat16'" in found.reason


class MaskMaker(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2]
        return torch.full((size, size), torch.finfo(torch.float32).min).triu(1).to(x.dtype)


class MaskedAttention(nn.Module):
    """A mask from a module of its own, and scores that float16 cannot hold for a large ``gain``."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embed, self.mask, self.attn, self.head = nn.Linear(8, 8), MaskMaker(), AddMask(gain), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.attn(x, self.mask(x)).mean(1))


class AddMask(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.out, self.gain = nn.Linear(8, 8), gain

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (x * self.gain) @ (x * self.gain).mT / self.gain**2
        return self.out((scores + mask).softmax(-1) @ x)


def test_infinities_of_masks_rule_nothing_out() -> None:
    found = suggest(MaskedAttention(1.0), shape=(6, 8), levels=['O2', 'O5'])
    assert kinds(found, 'O2') == kinds(found, 'O5') == []
    assert "numbers of 'mask' (MaskMaker) become infinite" in entry(found, 'O2')['remarks'][0]
    found = suggest(MaskedAttention(3e3), shape=(6, 8), levels=['O2'])
    # and beside a mask, what does is named
    assert kinds(found, 'O2') == ['forward']
    assert "'attn' (AddMask)" in entry(found, 'O2')['reasons'][0]['text']


def test_any_error_at_a_level_rules_it_out() -> None:
    class Table(PlainCNN):
        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            return self.head(out * {torch.float32: 1.0, torch.float16: 1.0}[out.dtype])

    found = suggest(Table(), shape=(1, 8, 8), levels=['O2', 'O5'])
    assert found.level == 'O2'
    assert entry(found, 'O5')['reasons'] == [{'kind': 'cannot', 'text': 'KeyError: torch.bfloat16'}]


def test_weights_of_the_model_itself_that_float16_cannot_hold() -> None:
    class Positions(PlainCNN):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.full((1, 1, 8, 8), 1e5))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x + self.positions) / 1e5)

    found = suggest(Positions(), shape=(1, 8, 8), levels=['O2', 'O5'])
    assert found.level == 'O5'
    # no submodule has them, so keep_fp32 is no remedy
    assert 'in no submodule that keep_fp32 could name: use bfloat16' in found.reason
    assert 'keep_fp32=' not in found.reason
    assert '..' not in found.reason


def test_complex_weights_are_left_as_they_are() -> None:
    class Phases(PlainCNN):
        def __init__(self) -> None:
            super().__init__()
            self.phases = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.phases.abs()

    found = suggest(
        Phases(), shape=(1, 8, 8), levels=['O5'], make_optimizer=lambda m: torch.optim.AdamW(m.parameters())
    )
    assert found.level == 'O5'
    assert entry(found, 'O5')['gradients']['error'] < 0.1


@pytest.mark.parametrize('reentrant', [True, False])
def test_segments_that_are_computed_again_are_not_counted(reentrant: bool) -> None:
    class Segments(PlainCNN):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.again = again

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            out = checkpoint(self.net, x, use_reentrant=reentrant) if self.again else self.net(x)
            return self.head(out)

    def activations(again: bool) -> int:
        found = suggest(Segments(again), shape=(1, 8, 8), levels=['O5'])
        return entry(found, 'O5')['memory']['counted']['activations']

    assert activations(again=True) < activations(again=False) / 4


def test_overrides_hold_for_every_level_that_can_have_them() -> None:
    found = suggest(PlainCNN(), shape=(1, 8, 8), levels=['O4', 'O5'], master_weights='split', keep_fp32=['head'])
    assert found.level == 'O5'
    assert "master_weights='split' conflicts" in entry(found, 'O4')['reasons'][0]['text']
    assert found.script == (
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O5', master_weights='split', keep_fp32=['head'])"
    )


def test_the_result_as_text_page_table_and_data(tmp_path: Any) -> None:
    from rich.console import Console

    found = suggest(OffsetInside(), levels=['O0', 'O5'])
    text = str(found)
    assert text.startswith(found.reason)
    assert found.config in text
    assert found.script in text
    console = Console(width=160, record=True, file=open(tmp_path / 'out', 'w'))  # noqa: SIM115
    console.print(found.table())
    shown = console.export_text()
    assert "O5 keep_fp32=['stem.1']" in shown
    assert 'recommended' in shown
    html = found.html()
    for part in ('Recommended level: O5', 'stem.1', 'Modules of O5 in FP32', 'Search modules'):
        assert part in html
    data = json.loads(pages.to_json(found.data))
    assert data['level'] == 'O5'
    assert data['levels'][1]['modules'][0]['class'] == 'OffsetInside'
    assert found.data['optimizer'] == 'FusedAdamW with a learning rate of 0.001, since none was given'


def test_the_lines_of_the_result_work() -> None:
    found = suggest(OffsetInside(), levels=['O0', 'O5'])
    names: dict[str, Any] = {}
    exec(found.config, names)
    wrapper = build_optim_wrapper(OffsetInside(), {**names['optim_wrapper'], 'optimizer': dict(type='SGD', lr=0.1)})
    assert isinstance(wrapper, AmpOptimWrapper)
    model = OffsetInside()
    words = {'amp': amp, 'model': model, 'optimizer': torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(found.script.replace(')', ', verbosity=0)'), words)
    assert model.head.weight.dtype is torch.bfloat16


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('words', 'text'),
    [
        ({'levels': ['O7']}, 'levels='),
        ({'levels': []}, 'levels='),
        ({'steps': 3}, 'steps=3 must be a whole number of at least 4'),
        ({'prefer': 'beauty'}, "prefer='beauty'"),
        ({'max_trials': -1}, 'max_trials=-1'),
        ({'levels': 5}, 'levels=5'),
        ({'steps': 4.5}, 'steps=4.5'),
        ({'steps': True}, 'steps=True'),
        ({'max_trials': None}, 'max_trials=None'),
        ({'seed': 'zero'}, "seed='zero' must be a whole number"),
        ({'make_optimizer': torch.optim.SGD([torch.ones(1)], 0.1)}, 'make_optimizer=SGD must be a function'),
        ({'make_optimizer': torch.optim.SGD}, 'make_optimizer=SGD is the class'),
        ({'kep_fp32': ['head']}, "kep_fp32=... is no option (did you mean 'keep_fp32'?)"),
        ({'step': 8}, "step=... is no option (did you mean 'steps'?)"),
        ({'keep_fp32': ['hed']}, "keep_fp32='hed' matches no module (did you mean 'head'?)"),
        ({'fp32_ops': ['torch.nn.GRU']}, "fp32_ops='torch.nn.GRU' matches no module"),
        ({'num_losses': 2}, 'num_losses=2 cannot be tried'),
        ({'loss_scale': -1}, 'loss_scale=-1'),
        ({'levels': ['O1'], 'master_weights': True}, 'master_weights=True conflicts'),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(words: dict[str, Any], text: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError

    with pytest.raises(AmpConfigError, match=re.escape(text)):
        suggest(PlainCNN(), loss_fn, (1, 8, 8), **words)


def test_wrong_models_batches_and_losses_are_refused() -> None:
    data = batches(2, 1, 8, 8)
    with pytest.raises(AmpConfigError, match='model=int'):
        amp.suggest_level(3, cross_entropy, data)  # type: ignore[arg-type]
    with pytest.raises(AmpConfigError, match='no parameter that requires a gradient'):
        amp.suggest_level(nn.ReLU(), cross_entropy, data)
    with pytest.raises(AmpConfigError, match='loss_fn=None'):
        amp.suggest_level(PlainCNN(), None, data)  # type: ignore[arg-type]
    with pytest.raises(AmpConfigError, match='batches=int'):
        amp.suggest_level(PlainCNN(), cross_entropy, 3)  # type: ignore[arg-type]
    for one in ({'x': data[0]}, 'batches', None):
        with pytest.raises(AmpConfigError, match=f'batches={type(one).__name__}'):
            amp.suggest_level(PlainCNN(), cross_entropy, one)  # type: ignore[arg-type]
    with pytest.raises(AmpUsageError, match='batches is empty'):
        amp.suggest_level(PlainCNN(), cross_entropy, [])
    with pytest.raises(AmpUsageError, match=r'returned a tensor of shape \(32, 4\)'):
        amp.suggest_level(PlainCNN(), lambda model, batch: model(batch[0]), data)
    with pytest.raises(AmpUsageError, match='the first loss is nan in FP32'):
        amp.suggest_level(PlainCNN(), lambda model, batch: cross_entropy(model, batch) * float('nan'), data)


def test_batches_that_fail_while_they_are_read_say_what_they_say() -> None:
    class Broken:
        def __iter__(self) -> Any:
            raise TypeError('worker 0 cannot\npickle this')

    with pytest.raises(
        AmpUsageError, match=r'batches=Broken cannot be read \(TypeError: worker 0 cannot pickle this\)'
    ):
        amp.suggest_level(PlainCNN(), cross_entropy, Broken(), progress=False)
    # the old way of Python to be iterable
    indexed = type('Indexed', (), {'__getitem__': batches(STEPS, 1, 8, 8).__getitem__})()
    assert (
        amp.suggest_level(PlainCNN(), cross_entropy, indexed, levels=['O0'], steps=STEPS, progress=False).level == 'O0'
    )


def test_a_function_that_makes_no_optimizer() -> None:
    with pytest.raises(AmpUsageError, match='gave None: it must return'):
        suggest(PlainCNN(), cross_entropy, (1, 8, 8), make_optimizer=lambda model: None)


def test_numbers_of_numpy() -> None:
    words: Any = {'steps': np.int64(STEPS), 'max_trials': np.int64(0)}
    found = suggest(PlainCNN(), cross_entropy, (1, 8, 8), levels=['O0', 'O5'], seed=np.int32(1), **words)
    assert json.loads(pages.to_json(found.data))['seed'] == 1


def test_a_loss_of_gradients() -> None:
    """Such as a gradient penalty: it needs the graph wherever it is computed."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        images = batch[0].clone().requires_grad_()
        scores = model(images).float()
        (gradient,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
        return F.cross_entropy(scores, batch[1]) + gradient.float().square().sum()

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4))
    found = suggest(model, loss_fn, (1, 8, 8), levels=['O0', 'O5'])
    assert entry(found, 'O5')['loss']['after'] is not None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_of_another_model_is_refused_and_leaves_it_alone() -> None:
    model = PlainCNN()
    before = snapshot(model, None)
    with pytest.raises(AmpUsageError, match='it has to call the model that it is given'):
        suggest(model, lambda _, batch: cross_entropy(model, batch), (1, 8, 8))
    after = snapshot(model, None)
    del before['versions'], after['versions']
    assert differences(before, after) == []
