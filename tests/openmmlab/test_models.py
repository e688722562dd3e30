"""Small models that do what models of mmpretrain, mmsegmentation and mmdetection do and mixed precision could break.

Each is named after the model that showed it in ``nox -s downstream``; here none of those packages is needed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpOptimWrapper

LEVELS = ('O1', 'O2', 'O4', 'O5')
HALF = {'O1': torch.float16, 'O2': torch.float16, 'O4': torch.bfloat16, 'O5': torch.bfloat16}
ME = __name__


class Head(nn.Module):
    """The verbs of mmdetection's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Conv2d(8, 2, 1)
        self.reg = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls(x), self.reg(x)

    def loss(self, x: Tensor) -> dict[str, Tensor]:
        return self.loss_by_feat(*self(x))

    def predict(self, x: Tensor) -> Any:
        return self.predict_by_feat(*self(x))

    def loss_by_feat(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        return dict(loss=scores.square().mean() + boxes.abs().mean())

    def predict_by_feat(self, scores: Tensor, boxes: Tensor) -> Any:
        # bfloat16 has no 1001, float16 no 70001
        points = torch.arange(1000, 1004, dtype=scores.dtype, device=scores.device)
        return [InstanceData(scores=s.flatten()[:4], labels=points.long() + 69001, bboxes=points) for s in scores]


class Detector(BaseModel):
    def __init__(self, head: type[nn.Module] = Head) -> None:
        super().__init__(data_preprocessor=BaseDataPreprocessor())
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.bbox_head: Any = head()

    def forward(self, inputs: Tensor, data_samples: Any = None, mode: str = 'tensor') -> Any:
        features = self.backbone(inputs)
        self.seen = features.dtype
        return self.bbox_head.loss(features) if mode == 'loss' else self.bbox_head.predict(features)


def data(device: torch.device) -> dict[str, Tensor]:
    return dict(inputs=torch.linspace(-1, 1, 2 * 3 * 8 * 8, device=device).reshape(2, 3, 8, 8))


def wrapped(model: nn.Module, level: str, parameters: Any = None, **options: Any) -> AmpOptimWrapper:
    optimizer = SGD(model.parameters() if parameters is None else parameters, lr=0.01)
    return AmpOptimWrapper(opt_level=level, optimizer=optimizer, **options)


def train(head: type[nn.Module], level: str, device: torch.device, *ops: str) -> tuple[Detector, float]:
    """One training step: the model and its loss before the step."""
    model = Detector(head).to(device).train()
    scale = dict(loss_scale=128.0) if level in ('O1', 'O2') else {}
    log = model.train_step(data(device), wrapped(model, level, fp32_ops=[f'{ME}.{name}' for name in ops], **scale))
    assert model.seen is HALF.get(level, torch.float32)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return model, float(log['loss'].detach())


# -- heads ------------------------------------------------------------------------------------------------------------


class NMSop(torch.autograd.Function):
    """mmcv's reads its boxes as float32."""

    @staticmethod
    def forward(ctx: Any, boxes: Tensor, scores: Tensor) -> Tensor:
        if boxes.dtype is not torch.float32:
            raise RuntimeError(f'expected scalar type Float but found {boxes.dtype}')
        return scores.argsort(descending=True)


class RoIAlign(torch.autograd.Function):
    """mmcv's has float16 kernels, no bfloat16 ones, and wants one type for maps, boxes and gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rois: Tensor) -> Tensor:
        if x.dtype is torch.bfloat16 or x.dtype is not rois.dtype:
            raise RuntimeError(f'"ROIAlign_forward" not implemented for {x.dtype} and {rois.dtype}')
        ctx.save_for_backward(rois)
        return x * rois.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rois,) = ctx.saved_tensors
        assert gradient.dtype is rois.dtype
        return gradient * rois.sum(), None


roi_align = RoIAlign.apply


class FasterRcnn(Head):
    """Proposals inside of ``loss``: nms and RoIAlign on 16-bit maps."""

    def loss(self, x: Tensor) -> dict[str, Tensor]:
        scores, boxes = self(x)
        keep = NMSop.apply(boxes.flatten(2), scores.mean((1, 2, 3)))
        pooled = roi_align(x, torch.full((2, 4), 0.125, device=x.device))
        assert pooled.dtype is x.dtype
        return dict(loss=self.cls(pooled)[keep].float().square().mean() + boxes.float().abs().mean())


class DeformableDetr(Head):
    """16-bit values are sampled at FP32 locations."""

    def loss(self, x: Tensor) -> dict[str, Tensor]:
        grid = torch.linspace(-0.9, 0.9, 2 * 4 * 4 * 2, device=x.device).reshape(2, 4, 4, 2)
        return self.loss_by_feat(F.grid_sample(self.cls(x), grid, align_corners=False), x)


class Yolox(Head):
    """Anchors are made in the type of the scores."""

    def loss_by_feat(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        points = torch.arange(1000, 1004, dtype=scores.dtype, device=scores.device)
        return dict(loss=(points - 1000).sum() / 6 + 0 * scores.sum() + 0 * boxes.sum())


class Extractor(nn.Module):
    """SingleRoIExtractor casts its boxes to the type of the maps."""

    def forward(self, maps: Tensor, rois: Tensor) -> tuple[Tensor, Tensor]:
        self.rois = rois.type_as(maps).tolist()
        return maps * 1, rois


class MaskRcnn(Head):
    def __init__(self) -> None:
        super().__init__()
        self.extractor = Extractor()

    def loss(self, x: Tensor) -> dict[str, Tensor]:
        pooled, _ = self.extractor(x, torch.tensor([[1001.0, 3.0]], device=x.device))
        assert pooled.dtype is x.dtype and self.extractor.rois == [[1001.0, 3.0]]
        return dict(loss=self.cls(pooled).float().square().mean() + self.reg(pooled).float().square().mean())


class Fcn(Head):
    """mmsegmentation resizes and sums in ``loss_by_feat``."""

    def loss_by_feat(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        assert scores.dtype is torch.float32 and not torch.is_autocast_enabled(scores.device.type)
        target = torch.zeros(len(scores), 64, 64, dtype=torch.int64, device=scores.device)
        resized = F.interpolate(scores, (64, 64), mode='bilinear', align_corners=False)
        return dict(loss=F.cross_entropy(resized, target, reduction='sum'))


#: What each needs in ``fp32_ops``.
HEADS: dict[type[Head], tuple[str, ...]] = {
    FasterRcnn: ('NMSop', 'RoIAlign'),
    DeformableDetr: (),
    Yolox: (),
    MaskRcnn: ('Extractor',),
    Fcn: (),
}


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('head', HEADS)
def test_loss_is_that_of_fp32(head: type[Head], level: str, device: torch.device) -> None:
    model, loss = train(head, level, device, *HEADS[head])
    assert loss == pytest.approx(train(head, 'O0', device, *HEADS[head])[1], rel=2e-2)
    model.eval()
    for prediction in model.val_step(data(device)):
        assert prediction.scores.dtype is torch.float32
        assert prediction.bboxes.tolist() == [1000.0, 1001.0, 1002.0, 1003.0]
        assert prediction.labels.tolist() == [70001, 70002, 70003, 70004]


# -- models whose train_step calls their parts ------------------------------------------------------------------------


class OwnTrainStep(Detector):
    """As those of GANs and of wrappers around a detector, it never calls the model itself."""

    def losses(self, inputs: Tensor) -> Tensor:
        return self.bbox_head.loss(self.backbone(inputs))['loss']

    def train_step(self, data: dict[str, Any], optim_wrapper: AmpOptimWrapper) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self.losses(data['inputs'])
        assert loss.dtype is torch.float32
        optim_wrapper.update_params(loss)
        return dict(loss=loss.detach())


class LossInTrainStep(OwnTrainStep):
    def losses(self, inputs: Tensor) -> Tensor:
        features = self.backbone(inputs)
        return F.l1_loss(features, features * 0)


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize(('kind', 'all_owned'), [(OwnTrainStep, True), (OwnTrainStep, False), (LossInTrainStep, True)])
def test_train_step_past_the_model(kind: type[OwnTrainStep], all_owned: bool, level: str, device: torch.device) -> None:
    model = kind(Fcn).to(device)
    model.extra = nn.Parameter(torch.ones(1, device=device))
    parts = [*model.backbone.parameters(), *model.bbox_head.parameters()]
    wrapper = wrapped(model, level, None if all_owned else parts)
    assert model.train_step(data(device), wrapper)['loss'].isfinite()


class Discriminator(nn.Module):
    """A checkpointed segment with an op that its own wrapper names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: named_op(self.fc(x)), x, use_reentrant=False).sum()


op_types: list[torch.dtype] = []


def named_op(x: Tensor) -> Tensor:
    op_types.append(x.dtype)
    return x * x


def test_loss_of_a_generator_runs_back_through_the_discriminator(device: torch.device) -> None:
    op_types.clear()
    generator, discriminator = nn.Linear(4, 4).to(device), Discriminator().to(device)
    first, second = wrapped(generator, 'O5'), wrapped(discriminator, 'O5', fp32_ops=[f'{ME}.named_op'])
    first.attach(generator)
    second.attach(discriminator)
    with first.optim_context(generator):
        loss = discriminator(generator(torch.ones(2, 4, device=device)))
    first.update_params(loss)
    assert op_types == [torch.float32] * 2


# -- layers that join ``ModuleList.insert``, which goes past torch's registration hooks -----------------------------------


def test_inserted_layer_whose_kernel_wants_one_type_is_explained(device: torch.device) -> None:
    model = Detector().to(device)
    wrapper = wrapped(model, 'O2')
    wrapper.attach(model)
    model.backbone.insert(1, nn.PReLU(8).to(device))
    with pytest.raises(RuntimeError, match=r'backbone\.1 \(PReLU\) joined the model'):
        model.train_step(data(device), wrapper)


def test_inserted_layer_that_the_optimizer_knows_is_trained(device: torch.device) -> None:
    """A product computes in 16-bit with the FP32 weight that joined, and its gradient is unscaled as others are."""

    def change(level: str) -> Tensor:
        model = Detector().to(device)
        wrapper = wrapped(model, level)
        wrapper.attach(model)
        layer = nn.Conv2d(8, 8, 1).to(device)
        model.backbone.insert(1, layer)
        wrapper.optimizer.add_param_group(dict(params=list(layer.parameters()), lr=1.0))
        before = layer.weight.detach().clone()
        model.train_step(data(device), wrapper)
        assert layer.weight.dtype is torch.float32
        return layer.weight.detach() - before

    expected = change('O0')
    assert expected.abs().max() > 0
    # float16 rounds to 2**-11 of a value, in a forward and a backward pass of a few layers
    assert (change('O2') - expected).abs().max() <= 2**-5 * expected.abs().max()
