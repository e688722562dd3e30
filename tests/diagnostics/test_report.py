"""``amp.report`` on models of which it is known what runs in FP32, what 16-bit types lose, and what a step holds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpAttachError, AmpConfigError, AmpUsageError, FusedAdam, PrecisionReport, amp
from amp_wrapper import __version__ as version


def by_name(report: PrecisionReport) -> dict[str, dict[str, Any]]:
    return {module['name']: module for module in report.data['modules']}


def in_fp32(module: dict[str, Any]) -> list[tuple[str, str]]:
    """The ops that ran in FP32, and the rule for each."""
    return [(op['op'], op['rule']) for op in module['fp32_ops']]


class Known(nn.Module):
    """Each module has FP32 ops of one known cause, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)
        self.parts = nn.ModuleList([nn.Linear(4, 4)])
        self.loss = nn.CrossEntropyLoss()
        self.register_buffer('matrix', torch.eye(4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu().mean((2, 3))
        x = self.norm(x) @ torch.linalg.inv(self.matrix)
        x = self.head(torch.softmax(x, -1).float() * 2)
        x = self.parts[0](self.parts[0](x))
        return self.loss(x, labels)


BATCH = (torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1]))


def known(level: str, **options: Any) -> PrecisionReport:
    return amp.report(Known(), BATCH, level, lambda model, batch: model(*batch), **options)


# -- what runs in which type -----------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
def test_what_runs_in_fp32_and_why(level: str) -> None:
    half = 'float16' if level in ('O1', 'O2') else 'bfloat16'
    is_cast = level in ('O2', 'O5')
    found = by_name(known(level, fp32_ops=['torch.Tensor.relu'], keep_fp32=['norm'] if is_cast else None))
    softmax = [] if is_cast else [('_softmax', 'autocast')]
    # .float() by the model itself
    by_itself = [('relu', 'fp32_ops'), ('linalg_inv_ex', 'registry'), *softmax, ('mul', '')]
    assert in_fp32(found['']) == by_itself
    assert in_fp32(found['bn']) == [('native_batch_norm', 'batchnorm' if is_cast else '')]
    assert in_fp32(found['norm']) == [('native_layer_norm', 'keep_fp32' if is_cast else 'autocast')]
    assert {rule for _, rule in in_fp32(found['loss'])} == {'loss'}
    assert in_fp32(found['conv']) == in_fp32(found['head']) == []
    assert found['conv']['ops'] == {half: {'convolution': 1}}
    assert found['parts.0']['ops'] == {half: {'addmm': 2}}
    assert found['']['ops'][half]['mm'] == 1
    kept = {'rule': 'keep_fp32', 'name': 'norm', 'reason': "named by keep_fp32='norm'"}
    assert found['norm']['kept'] == (kept if is_cast else None)


def test_fp32_has_no_rules_and_a_loss_outside_of_the_model_a_row() -> None:
    report = known('O0')
    assert [op for module in report.data['modules'] for op in module['fp32_ops']] == []
    assert by_name(report)['conv']['ops'] == {'float32': {'convolution': 1}}
    loss_fn = lambda model, x: F.mse_loss(model(x), torch.ones(2, 3))  # noqa: E731
    outside = by_name(amp.report(nn.Linear(4, 3), torch.ones(2, 4), 'O2', loss_fn))['(outside the model)']
    assert in_fp32(outside) == [('mse_loss', 'registry')]


def test_types_of_weights_outputs_and_gradients_and_counts_of_calls() -> None:
    found = by_name(known('O2', keep_fp32=['head']))
    assert found['conv']['weights'] == {'float16': 40}
    assert found['bn']['weights'] == {'float32': 8}
    assert found['']['weights'] == {} and found['head']['weights'] == {'float32': 20}
    # kept in FP32, and the 16-bit type goes on outside of it
    assert found['head']['outputs'] == ['float16'] and found['head']['ops'] == {'float32': {'addmm': 1}}
    # both calls of a module count
    assert found['parts.0']['ranges']['outputs']['elements'] == 16
    once = dict.fromkeys(('', 'conv', 'bn', 'norm', 'head', 'loss'), 1)
    assert {name: module['calls'] for name, module in found.items()} == {**once, 'unused': 0, 'parts': 0, 'parts.0': 2}
    split = amp.report(nn.Linear(4, 3), torch.ones(2, 4), 'O5', make_optimizer=FUSED, master_weights='split')
    assert split.data['memory']['O5']['masters'] == 15 * 2


def test_output_that_modules_hand_on_counts_for_the_innermost() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 2)))
    found = by_name(amp.report(model, torch.ones(3, 4), 'O5', lambda model, x: model(x).square().sum()))
    counts = {name: module['ranges'].get('gradients', {}).get('elements') for name, module in found.items()}
    outside = '(outside the model)'
    assert counts == {'': None, '0': None, '0.0': 4 * 2 + 2 + 3 * 2, outside: None}


@pytest.mark.parametrize('reentrant', [True, False])
def test_checkpointed_segments_count_once_and_keep_less(reentrant: bool) -> None:
    class Segments(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self[1], self[0](x), use_reentrant=reentrant)

    parts = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    models = [Segments(*parts), nn.Sequential(*parts)]
    reports = [amp.report(model, torch.randn(2, 4), 'O2', lambda model, x: model(x).sum()) for model in models]
    found = by_name(reports[0])['1.0']
    assert (found['calls'], found['ops'], found['ranges']['gradients']['elements']) == (
        1,
        {'float16': {'addmm': 1}},
        8 + 20,
    )
    kept = [report.data['memory']['O2']['activations'] for report in reports]
    # 2 x 4 results of the hyperbolic tangent, in 2 bytes each
    assert kept[0] <= kept[1] - 16


def test_examples_and_outputs_in_containers() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return dict(out=[super().forward(x)], count=1)

    for example in ((torch.ones(2, 4),), dict(x=torch.ones(2, 4)), torch.ones(2, 4)):
        with torch.inference_mode():
            found = by_name(amp.report(Model(4, 3), example, 'O2'))['']
        assert found['ops'] == {'float16': {'addmm': 1}} and found['outputs'] == ['float32']


# -- what 16-bit types lose ------------------------------------------------------------------------------------------


def linear(*rows: list[float]) -> nn.Linear:
    """A layer with these weights and without a bias."""
    layer = nn.Linear(len(rows[0]), len(rows), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows))
    return layer


def lost(ranges: dict[str, Any]) -> list[float]:
    return [ranges['infinite'] / ranges['elements'], ranges['zero'] / ranges['elements']]


def test_shares_of_weights_and_outputs_that_float16_loses() -> None:
    # too large for float16; zero in it, also by a tie; what rounds up to the smallest number; three that it holds, and zero
    layer = linear([1e5, 1e-9, 2.0**-25, 2.0**-25 * 1.25], [1.0, 0.0, -2.0, 0.5])
    report = amp.report(layer, torch.ones(1, 4), 'O5')
    found = report.data['modules'][0]['ranges']['weights']
    # an error of the level, as in a training
    assert 'range' in report.data['memory']['O2']['error']
    with pytest.raises(AmpAttachError, match='range'):
        amp.report(layer, torch.ones(1, 4), 'O2')
    assert (found['elements'], found['largest'], lost(found)) == (8, 1e5, [1 / 8, 2 / 8])
    model = nn.Sequential(linear([1.0], [4.0]), nn.Identity())
    report = amp.report(model, torch.tensor([[30000.0]]), 'O2')
    found = by_name(report)['0']['ranges']['outputs']
    assert found['largest'] == 120000.0 and lost(found) == [1 / 2, 0]
    assert 'float16 has no room for outputs of (model), 0, 1.' in report.lead


@pytest.mark.parametrize(
    ('batch', 'factor', 'options', 'overflow', 'underflow'),
    [
        # gradients 2 ** -28 and 2 ** -30 of weights, and 2 ** -30 of the output: zero without a scale
        ([4.0, 1.0], 2.0**-30, {}, 0, 0),
        # 4 * 2 ** 15 is too large, 1 * 2 ** 15 and 0.25 * 2 ** 15 are not
        ([4.0, 0.25], 1.0, {'loss_scale': 2.0**15}, 1 / 3, 0),
        # a static scale is taken as it is: 100 * 1000 overflows, 65 * 1000 does not
        ([100.0, 65.0], 1.0, {'loss_scale': 1000.0}, 1 / 3, 0),
        ([100.0, 65.0], 1.0, {'loss_scale': 3.0}, 0, 0),
        # 2 ** -25 is a tie, which goes to zero, and what is above it does not
        ([2.0**13, 2.0**-25, 2.0**-25 * 1.25], 1.0, {'loss_scale': 1.0}, 0, 1 / 4),
    ],
)
def test_gradients_that_are_lost_at_a_loss_scale(
    batch: list[float], factor: float, options: dict[str, Any], overflow: float, underflow: float
) -> None:
    layer = linear([1.0] * len(batch))
    report = amp.report(layer, torch.tensor([batch]), 'O2', lambda model, x: (model(x) * factor).sum(), **options)
    assert lost(report.data['modules'][0]['ranges']['gradients']) == [overflow, underflow]


# -- memory ----------------------------------------------------------------------------------------------------------


FUSED, ADAM = (lambda model, kind=kind: kind(model.parameters()) for kind in (FusedAdam, torch.optim.Adam))


def test_bytes_by_level_counted_by_hand() -> None:
    model = nn.Linear(4, 3, bias=False)
    model.register_buffer('count', torch.zeros((), dtype=torch.int64))
    model.register_buffer('view_of_it', model.count.view(1))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x.requires_grad_()), torch.zeros(2, 3))

    report = amp.report(model, torch.ones(2, 4), 'O2', loss_fn, make_optimizer=ADAM)
    # 12 weights. Adam has two numbers for each, and a float32 step. A count of 8 bytes.
    # Kept for the backward pass: 8 inputs of the layer, in its type; 6 outputs and 6 targets of the loss, in FP32. Weights are
    # there anyway, casts of them are not.
    expected = {
        level: {
            'weights': 24 if level in ('O2', 'O3', 'O5') else 48,
            'gradients': 24 if level in ('O2', 'O3', 'O5') else 48,
            'masters': 48 if level in ('O2', 'O5') else 0,
            'optimizer_state': 4 + (48 if level == 'O3' else 96),
            'activations': 48 + {'O0': 32, 'O1': 16 + 24, 'O4': 16 + 24}.get(level, 16),
            'buffers': 8,
        }
        for level in ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
    }
    memory = report.data['memory']
    assert {level: {name: memory[level][name] for name in each} for level, each in expected.items()} == expected
    assert all(memory[level]['total'] == sum(each.values()) for level, each in expected.items())
    assert report.data['optimizer'] == 'Adam'


def test_memory_without_an_optimizer_or_trained_weights() -> None:
    model, x = nn.Linear(4, 3), torch.ones(2, 4)
    data = amp.report(model, x, 'O2').data
    assert data['optimizer'] is data['loss'] is None and 'gradients' not in data['modules'][0]['ranges']
    # its masters are counted all the same
    assert (data['memory']['O2']['optimizer_state'], data['memory']['O2']['masters']) == (0, 15 * 4)
    # 65536 times 1e5 is infinite in float16
    memory = amp.report(model, x, 'O2', lambda model, x: model(x).sum() * 1e5, make_optimizer=ADAM).data['memory']
    assert memory['O2']['optimizer_state'] == memory['O0']['optimizer_state'] > 0
    frozen = amp.report(model.requires_grad_(False), x, 'O2').data['memory']['O2']
    assert frozen['masters'] == frozen['activations'] == frozen['gradients'] == 0


def test_error_of_another_level_is_in_its_row() -> None:
    class Table(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * {torch.float32: 1.0, torch.bfloat16: 2.0}[y.dtype]

    report = amp.report(Table(4, 3), torch.ones(2, 4), 'O5')
    errors = {level: counted['error'] for level, counted in report.data['memory'].items() if 'error' in counted}
    assert errors == dict.fromkeys(('O1', 'O2', 'O3'), 'KeyError: torch.float16')
    assert all('KeyError: torch.float16' in text for text in (str(report), report.html()))


# -- what a report leaves alone --------------------------------------------------------------------------------------


def test_optimizers_and_batches_are_made_for_copies() -> None:
    model = nn.Linear(4, 2)
    batch = SimpleNamespace(x=torch.ones(3, 4))
    losses: list[float] = []
    seen: list[nn.Module] = []

    def make(copied: nn.Module) -> torch.optim.Optimizer:
        seen.append(copied)
        copied.bias.requires_grad_(False)
        return torch.optim.SGD(copied.parameters(), lr=0.1)

    def loss_fn(copied: nn.Module, given: Any) -> Tensor:
        given.x.mul_(10)
        losses.append(float(given.x.sum()))
        return copied(given.x).float().square().mean()

    report = amp.report(model, batch, 'O5', loss_fn, make_optimizer=make)
    assert seen and not any(each is model for each in seen) and model.bias.requires_grad
    assert report.data['optimizer'] == 'SGD'
    assert torch.equal(batch.x, torch.ones(3, 4)) and set(losses) == {120.0}


class Never(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({'keep_fp23': ['x']}, AmpConfigError, "did you mean 'keep_fp32'"),
    ({'opt_level': 'O7'}, AmpConfigError, "opt_level='O7'"),
    ({'enabled': False}, AmpConfigError, 'enabled=False'),
    ({'fp32_ops': ['torch.nn.GRU']}, AmpConfigError, 'matches no module'),
    ({'model': print}, AmpUsageError, 'must be a torch.nn.Module'),
    ({'example': iter([1])}, AmpUsageError, 'example=list_iterator can be read once'),
    ({'loss_fn': 'mse'}, AmpConfigError, "loss_fn='mse' must be a function"),
    ({'loss_fn': lambda model, x: torch.ones(2, 3)}, AmpUsageError, r'a tensor of shape \(2, 3\)'),
    ({'make_optimizer': torch.optim.SGD([torch.ones(1)], 0.1)}, AmpConfigError, 'must be a function from a model'),
    ({'make_optimizer': torch.optim.AdamW}, AmpConfigError, "AdamW'> must be a function"),
    ({'make_optimizer': lambda model: None, 'model': nn.Linear(4, 3)}, AmpUsageError, 'gave None'),
]


def test_wrong_arguments_are_refused_before_the_model_runs() -> None:
    for words, error, text in REFUSED:
        with pytest.raises(error, match=text):
            amp.report(**{'model': Never(4, 3), 'example': torch.ones(2, 4), **words})


# -- how it is shown -------------------------------------------------------------------------------------------------


def test_text_page_and_json(tmp_path: Path) -> None:
    report = known('O2', make_optimizer=ADAM)
    text = str(report)
    page, data = report.write(tmp_path / 'new')
    html = page.read_text(encoding='utf-8')
    for part in ('Precision of Known at O2', 'native_batch_norm', 'batchnorm', 'CrossEntropyLoss'):
        assert part in text and part in html
    assert 'parts.0' in report.text(depth=2) and 'parts.0' not in report.text(depth=1)
    assert not [word for word in ('http', 'src=', 'url(') if word in html]
    assert (
        json.loads(data.read_text())
        == json.loads(report.json())
        == {**report.data, 'format': 2, 'amp_wrapper': version}
    )


def test_names_of_the_model_are_text_to_terminal_and_page() -> None:
    odd = type('[bold]<b>', (nn.Sequential,), {})(nn.Linear(2, 2))
    report = amp.report(nn.Sequential(odd), torch.ones(1, 2), 'O5')
    assert '[bold]<b>' in str(report)
    assert '[bold]<b>' not in report.html()
    assert '[bold]&lt;b&gt;' in report.html()


def test_write_that_fails_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = amp.report(nn.Linear(4, 3), torch.ones(2, 4), 'O5')
    before = {path.name: path.read_bytes() for path in report.write(tmp_path)}

    def full(*paths: Any) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'replace', full)
    with pytest.raises(OSError, match='No space'):
        report.write(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    """As in the lines of the monitor: a column has one type."""
    report = amp.report(nn.Linear(4, 3), torch.ones(2, 4), 'O4', lambda model, x: model(x).sum() * torch.inf)
    assert json.loads(report.json())['loss']['fp32'] is None


def test_loss_of_the_model_outside_is_refused_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(AmpUsageError, match='copy of yours'):
        amp.report(model, torch.ones(2, 4), 'O5', lambda _, x: model(x).sum())
    assert all(parameter.grad is None for parameter in model.parameters()) and model[1].num_batches_tracked == 0


def test_sparse_gradients_are_measured() -> None:
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))
    loss_fn = lambda model, x: model(x).float().square().sum()  # noqa: E731
    assert by_name(amp.report(model, torch.tensor([1, 2]), 'O2', loss_fn))['0']['ranges']['gradients']['elements'] > 0
    words: Any = {
        'steps': 4,
        'progress': False,
        'make_optimizer': lambda model: torch.optim.SGD(model.parameters(), 0.1),
    }
    assert amp.suggest_level(model, loss_fn, [torch.tensor([1, 1, 2])] * 4, **words).level
