"""``amp.report`` on models of which it is known what runs in FP32, and why."""

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

from amp_wrapper import AmpAttachError, AmpConfigError, AmpUsageError, PrecisionReport, amp
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


def test_types_of_weights_and_outputs() -> None:
    found = by_name(known('O2', keep_fp32=['head']))
    assert found['conv']['weights'] == ['float16'] and found['bn']['weights'] == found['head']['weights'] == ['float32']
    # kept in FP32, and the 16-bit type goes on outside of it
    assert found['head']['outputs'] == ['float16'] and found['head']['ops'] == {'float32': {'addmm': 1}}
    assert found['']['weights'] == found['unused']['outputs'] == found['parts']['outputs'] == []


@pytest.mark.parametrize('reentrant', [True, False])
def test_checkpointed_segments_count_once(reentrant: bool) -> None:
    class Segments(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self[1], self[0](x), use_reentrant=reentrant)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        return loss

    model = Segments(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    found = by_name(amp.report(model, torch.randn(2, 4), 'O2', loss_fn))['1.0']
    assert found['ops'] == {'float16': {'addmm': 1}}


def test_examples_and_outputs_in_containers() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return dict(out=[super().forward(x)], count=1)

    for example in ((torch.ones(2, 4),), dict(x=torch.ones(2, 4)), torch.ones(2, 4)):
        with torch.inference_mode():
            found = by_name(amp.report(Model(4, 3), example, 'O2'))['']
        assert found['ops'] == {'float16': {'addmm': 1}} and found['outputs'] == ['float32']


def test_outputs_that_float16_has_no_room_for_are_named() -> None:
    """Of the FP32 pass, so a level at which they are infinite has them too."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Identity())
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [4.0]]))
    report = amp.report(model, torch.tensor([[30000.0]]), 'O2')
    assert by_name(report)['0']['largest'] == 120000.0
    assert 'float16 has no room for outputs of (model), 0, 1.' in report.lead
    assert 'no room' not in amp.report(model, torch.tensor([[3.0]]), 'O2').lead
    with torch.no_grad():
        model[0].weight.fill_(1e5)
    # an error of the level, as in a training
    with pytest.raises(AmpAttachError, match='range'):
        amp.report(model, torch.ones(1, 1), 'O2')


# -- what a report leaves alone --------------------------------------------------------------------------------------


def test_batches_are_made_for_copies() -> None:
    model = nn.Linear(4, 2)
    batch = SimpleNamespace(x=torch.ones(3, 4))
    losses: list[float] = []

    def loss_fn(copied: nn.Module, given: Any) -> Tensor:
        given.x.mul_(10)
        losses.append(float(given.x.sum()))
        return copied(given.x).float().square().mean()

    amp.report(model, batch, 'O5', loss_fn)
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
]


def test_wrong_arguments_are_refused_before_the_model_runs() -> None:
    for words, error, text in REFUSED:
        with pytest.raises(error, match=text):
            amp.report(**{'model': Never(4, 3), 'example': torch.ones(2, 4), **words})


# -- how it is shown -------------------------------------------------------------------------------------------------


def test_text_page_and_json(tmp_path: Path) -> None:
    report = known('O2')
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
    for call, text in (
        (model, 'of the original was called, not that of the copy'),
        (torch.exp, 'no module of the model'),
    ):
        with pytest.raises(AmpUsageError, match=text):
            amp.report(model, torch.ones(2, 4), 'O5', lambda _, x, call=call: call(x).sum())
    assert all(parameter.grad is None for parameter in model.parameters()) and model[1].num_batches_tracked == 0
