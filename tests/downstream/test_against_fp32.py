"""Every model at every level against FP32: first loss, fall of the loss, predictions, memory, state dict."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from types_seen import narrow, tensors
from zoo import BY_NAME, Case, build_model, make_batch

from amp_wrapper import AmpOptimWrapper

STEPS = 36
WARM_STEPS = 12
#: How far the first loss may be from FP32, as a part of it. One rounding is 2^-11 in float16, 2^-8 in bfloat16; these
#: models add up some dozens of them, and detectors choose their samples by the rounded scores.
BOUNDS = {'O1': 0.005, 'O2': 0.005, 'O4': 0.02, 'O5': 0.02}
#: The same for weights that were trained for a dozen steps, on another batch; and for detectors that draw samples.
WARM_BOUNDS = {'O1': 0.002, 'O2': 0.002, 'O4': 0.01, 'O5': 0.01}
WARM_BOUND_OF_DRAWS = 0.08
TYPES = {'O1': torch.float16, 'O2': torch.float16, 'O4': torch.bfloat16, 'O5': torch.bfloat16}


def make(case: Case, level: str) -> tuple[nn.Module, AmpOptimWrapper]:
    model = build_model(case).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr)
    # the dynamic scale is searched for downwards from 2^16; a start below saves the skipped steps of the search
    scale = dict(init_scale=2.0**10) if level in ('O1', 'O2') else None
    return model, AmpOptimWrapper(opt_level=level, optimizer=optimizer, loss_scale=scale)


def overfit(model: nn.Module, wrapper: AmpOptimWrapper, case: Case) -> list[float]:
    """Losses of some dozens of steps on one batch, with the same random numbers in every step."""
    losses = []
    for _ in range(STEPS):
        torch.manual_seed(1)
        losses.append(float(model.train_step(make_batch(case), wrapper)['loss']))
    return losses


@functools.cache
def fp32_losses(name: str) -> tuple[float, ...]:
    case = BY_NAME[name]
    return tuple(overfit(*make(case, 'O0'), case))


@functools.cache
def warm_weights(name: str) -> dict[str, torch.Tensor]:
    """FP32 weights after a dozen steps: a fresh head gives ln(classes) whatever comes out of the backbone."""
    case = BY_NAME[name]
    model, wrapper = make(case, 'O0')
    for step in range(WARM_STEPS):
        torch.manual_seed(step)
        model.train_step(make_batch(case, seed=step), wrapper)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def warm_bound(case: Case, level: str) -> float:
    return WARM_BOUND_OF_DRAWS if case.draws else WARM_BOUNDS[level]


def warm_loss(case: Case, level: str, spoil: bool = False) -> float:
    """The loss of the warm weights at a level, on a batch that they were not trained on.

    Args:
        case: The model.
        level: Opt level.
        spoil: Whether to replace the weights of the first half of the parameters by noise of the same size.
    """
    model, wrapper = make(case, level)
    model.load_state_dict(warm_weights(case.name))
    if spoil:
        torch.manual_seed(0)
        # boxes of noise have negative sizes
        parameters = [parameter for name, parameter in model.named_parameters() if 'bboxes' not in name]
        for parameter in parameters[: len(parameters) // 2]:
            parameter.data.copy_(torch.randn_like(parameter) * parameter.std().nan_to_num(1))
    batch = model.data_preprocessor(make_batch(case, seed=100), True)
    torch.manual_seed(1)
    with wrapper.optim_context(model):
        loss, _ = model.parse_losses(model(**batch, mode='loss'))
    return float(loss.detach())


def test_training(case: Case, level: str) -> None:
    """The first loss, the loss at weights that were trained in FP32, and how far it falls in some dozens of steps."""
    reference = fp32_losses(case.name)
    losses = overfit(*make(case, level), case)
    warm_reference, warm = warm_loss(case, 'O0'), warm_loss(case, level)
    fall, fp32_fall = (sum(each[-5:]) / 5 / each[0] for each in (losses, reference))
    assert abs(losses[0] - reference[0]) <= BOUNDS[level] * reference[0]
    assert fp32_fall < 0.9, f'the FP32 loss itself falls to {fp32_fall:.2f} only'
    assert 1 - fall >= 0.7 * (1 - fp32_fall), f'falls to {fall:.2f} of its start, FP32 to {fp32_fall:.2f}'
    assert abs(warm - warm_reference) <= warm_bound(case, level) * warm_reference


def test_the_bound_after_warm_up_can_fail(case: Case) -> None:
    """Noise in half of the weights is seen by the loss, beyond the widest bound."""
    reference = warm_loss(case, 'O0')
    assert warm_loss(case, 'O0') == reference
    assert abs(warm_loss(case, 'O0', spoil=True) - reference) / reference > 1.4 * warm_bound(case, 'O5')


def test_predictions(case: Case, level: str) -> None:
    model, wrapper = make(case, level)
    model.train_step(make_batch(case), wrapper)
    model.eval()
    batch = make_batch(case)
    labels = {path: t.clone() for path, t in tensors(batch['data_samples']) if not t.is_floating_point()}
    with torch.no_grad():
        if case.name == 'MAE':  # has no predictions; its reconstruction is what comes out
            output: Any = model.data_preprocessor(batch)
            output = model(**output, mode='tensor')
        else:
            output = model.val_step(batch)
    found = dict(tensors(output))
    assert found and narrow(output) == []
    if case.name == 'MAE':
        return
    assert any('pred' in path for path in found)
    after = dict(tensors(output))
    for path in labels.keys() & after.keys():
        assert after[path].dtype is labels[path].dtype and after[path].equal(labels[path])
    kinds = {path.rsplit('.', 1)[-1]: t.dtype for path, t in found.items() if 'pred' in path}
    for key in ('labels', 'pred_label'):
        assert kinds.get(key, torch.int64) is torch.int64


def best_scores(case: Case, level: str) -> torch.Tensor:
    """What the warm weights predict: class scores, logits of a map, or the best scores of detections."""
    model, wrapper = make(case, level)
    model.load_state_dict(warm_weights(case.name))
    wrapper.attach(model)
    model.eval()
    with torch.no_grad():
        found = dict(tensors(model.val_step(make_batch(case, seed=100))))
    if case.project == 'mmpretrain':
        return found['.pred_score']
    if case.project == 'mmseg':
        return found['.seg_logits.data']
    return found['.pred_instances.scores'].sort(descending=True).values[:3]


def test_predictions_are_those_of_fp32(case: Case, level: str) -> None:
    if case.name == 'MAE':
        pytest.skip('MAE predicts nothing; its reconstruction is judged by its loss')
    reference, scores = best_scores(case, 'O0'), best_scores(case, level)
    difference = (scores - reference).abs().max() / reference.abs().max()
    assert difference <= (0.01 if level in ('O1', 'O2') else 0.06), f'{scores} against {reference}'


def test_memory_is_what_the_level_promises(case: Case, level: str) -> None:
    model, wrapper = make(case, level)
    batch = model.data_preprocessor(make_batch(case), True)
    with wrapper.optim_context(model):
        loss, _ = model.parse_losses(model(**batch, mode='loss'))
    wrapper.backward(loss)
    norms = {id(p) for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        narrow_here = level in ('O2', 'O5') and id(parameter) not in norms
        expected = TYPES[level] if narrow_here else torch.float32
        assert parameter.dtype is expected, name
        assert parameter.grad is None or parameter.grad.dtype is expected, name
    if level in ('O2', 'O5'):
        masters = {id(p) for group in wrapper.optimizer.param_groups for p in group['params']}
        assert all(p.dtype is torch.float32 for group in wrapper.optimizer.param_groups for p in group['params'])
        assert len(masters) == sum(1 for _ in model.parameters())


def test_state_dict_is_fp32_and_loads(case: Case, level: str) -> None:
    model, wrapper = make(case, level)
    model.train_step(make_batch(case), wrapper)
    state = model.state_dict()
    assert not {torch.float16, torch.bfloat16} & {value.dtype for value in state.values()}
    fresh = build_model(case, seed=1)
    fresh.load_state_dict(state)
    for left, right in zip(fresh.state_dict().values(), state.values()):
        assert left.equal(right)
