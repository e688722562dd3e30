"""``binary_cross_entropy`` of 16-bit probabilities: FP32, and one warning that names the logits version, in both APIs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_forward import APIS, TYPES, Inside, forward

from amp_wrapper import amp

Loss = Callable[[Tensor, Tensor], Tensor]


class Scored(Inside):
    """Two losses of the sigmoid of a layer, computed twice."""

    def __init__(self, kind: str, wide: bool = False, in_words: bool = False) -> None:
        super().__init__(self.losses, nn.BCELoss())
        self.kind, self.wide, self.in_words = kind, wide, in_words

    def losses(self, x: Tensor) -> Tensor:
        score = x.float().sigmoid() if self.wide else x.sigmoid()
        loss: Loss = {'module': self.parts[0], 'function': F.binary_cross_entropy}[self.kind]
        target = torch.full_like(score, 0.25)
        total = loss(score, target) + (loss(input=score, target=target) if self.in_words else loss(score, target))  # type: ignore[call-arg]
        self.types = score.dtype, total.dtype
        self.expected = 2 * F.binary_cross_entropy(score.detach().float(), target.float())
        return total


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if 'binary_cross_entropy' in r.getMessage()]


@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('level', TYPES)
@pytest.mark.parametrize('in_words', [False, True])
@pytest.mark.parametrize('kind', ['module', 'function'])
def test_both_apis_alike_at_every_level(
    kind: str, in_words: bool, level: str, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Scored(kind, in_words=in_words)
    with caplog.at_level('WARNING', 'amp_wrapper'):
        loss = forward(model, torch.randn(4, 8), level, api, verbosity=1)
    assert model.types == (TYPES[level], torch.float32) and torch.equal(loss, model.expected)
    (text,) = said(caplog)
    assert all(
        x in text for x in ('binary_cross_entropy_with_logits', 'nn.BCEWithLogitsLoss', 'sigmoid', 'exactly 0 or 1')
    )


@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize(
    ('level', 'kind', 'wide', 'verbosity'),
    [
        *[(level, kind, True, 1) for level in TYPES for kind in ('module', 'function')],
        ('O0', 'function', False, 1),
        ('O4', 'function', False, 0),
        ('O5', 'module', False, 0),
    ],
)
def test_nothing_is_said_of_fp32_or_where_all_is_silent(
    level: str,
    kind: str,
    wide: bool,
    verbosity: int,
    api: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # another model speaks
    amp.initialize(Inside(torch.sin), opt_level='O4', verbosity=1)
    with caplog.at_level('WARNING', 'amp_wrapper'):
        forward(Scored(kind, wide), torch.randn(4, 8), level, api, verbosity)
    assert said(caplog) == []


@pytest.mark.parametrize('level', TYPES)
def test_in_a_graph_as_outside(level: str, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()

    def body(x: Tensor) -> Tensor:
        return F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid())

    x = torch.randn(4, 8)
    for verbosity in (1, 0, 1):
        caplog.clear()
        # another model speaks
        amp.initialize(Inside(body), opt_level=level, verbosity=1)
        model = amp.initialize(Inside(body), opt_level=level, verbosity=verbosity)
        with caplog.at_level('WARNING', 'amp_wrapper'):
            loss = torch.compile(model, backend='aot_eager', fullgraph=True)(x)
        assert len(said(caplog)) == verbosity and torch.equal(loss, model(x))


@pytest.mark.parametrize('allowed', [False, True])
def test_the_oldest_handle_takes_allow_banned(allowed: bool, caplog: pytest.LogCaptureFixture) -> None:
    x, target = torch.rand(2, 4, dtype=torch.float16), torch.rand(2, 4)
    # silent models before this one
    forward(Scored('function', wide=True), torch.randn(4, 8), 'O4', 'amp', verbosity=1)
    handle = amp.init(allow_banned=allowed)
    try:
        with caplog.at_level('WARNING', 'amp_wrapper'):
            assert F.binary_cross_entropy(x, target).dtype is torch.float32
    finally:
        handle._deactivate()
    assert len(said(caplog)) == (not allowed)
