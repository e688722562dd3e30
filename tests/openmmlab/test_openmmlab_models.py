"""Small stand-ins for what the models of mmpretrain, mmsegmentation and mmdetection do that mixed precision breaks.

Each is named after the model that showed it in ``make test-downstream``; here none of those packages is needed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpOptimWrapper, AmpUsageError
from amp_wrapper.autocast import regions

LEVELS = ('O1', 'O2', 'O4', 'O5')
TYPES = {'O1': torch.float16, 'O2': torch.float16, 'O4': torch.bfloat16, 'O5': torch.bfloat16}
ME = __name__


class Detector(BaseModel):
    """A backbone, and a head whose three verbs are mmdetection's."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__(data_preprocessor=BaseDataPreprocessor())
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.bbox_head = head

    def forward(self, inputs: Tensor, data_samples: Any = None, mode: str = 'tensor') -> Any:
        features = self.backbone(inputs)
        self.seen = features.dtype
        if mode == 'loss':
            return self.bbox_head.loss(features)
        return self.bbox_head.predict(features)


class Head(nn.Module):
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
        return [InstanceData(scores=s.flatten(), labels=s.flatten().long() + 70001) for s in scores]


def images(device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 8 * 8, device=device).reshape(2, 3, 8, 8)


def train(head: nn.Module, level: str, device: torch.device, **options: Any) -> tuple[Detector, float]:
    """One training step.

    Returns:
        The model, and its first loss.
    """
    torch.manual_seed(0)
    model = Detector(head).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scale = 128.0 if level in ('O1', 'O2') else None
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, loss_scale=scale, **options)
    log = model.train_step(dict(inputs=images(device)), wrapper)
    assert model.seen is TYPES.get(level, torch.float32)
    return model, float(log['loss'].detach())


def seeded(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return cls()


# -- custom ops without 16-bit kernels ---------------------------------------------------------------------------------


def float_only(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype is not torch.float32:
            raise RuntimeError(f'expected scalar type Float but found {tensor.dtype}')


class NMSop(torch.autograd.Function):
    """mmcv's reads its boxes as float32."""

    @staticmethod
    def forward(ctx: Any, boxes: Tensor, scores: Tensor) -> Tensor:
        float_only(boxes)
        return scores.argsort(descending=True)


class RoIAlign(torch.autograd.Function):
    """mmcv's has float16 kernels, no bfloat16 ones, and wants one type for maps and boxes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rois: Tensor) -> Tensor:
        if x.dtype is torch.bfloat16:
            raise NotImplementedError('"ROIAlign_forward" not implemented for \'BFloat16\'')
        if x.dtype is not rois.dtype:
            raise RuntimeError('expected scalar type Half but found Float')
        ctx.save_for_backward(rois)
        ctx.shape = x.shape
        return x * rois.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rois,) = ctx.saved_tensors
        if gradient.dtype is not rois.dtype:
            raise RuntimeError('expected scalar type Half but found Float')
        return gradient * rois.sum(), None


roi_align = RoIAlign.apply


class FasterHead(Head):
    """Proposals inside ``loss``: nms and RoIAlign on 16-bit maps."""

    def loss(self, x: Tensor) -> dict[str, Tensor]:
        scores, boxes = self(x)
        keep = NMSop.apply(boxes.flatten(2), scores.mean((1, 2, 3)))
        pooled = roi_align(x, torch.full((2, 4), 0.125, device=x.device))
        assert pooled.dtype is x.dtype
        return dict(loss=self.cls(pooled)[keep].float().square().mean() + boxes.float().abs().mean())


@pytest.mark.parametrize('level', LEVELS)
def test_faster_rcnn_ops_without_16_bit_kernels(level: str, device: torch.device) -> None:
    reference = train(seeded(FasterHead), 'O0', device)[1]
    with pytest.raises((RuntimeError, NotImplementedError)):
        train(seeded(FasterHead), level, device)
    names = [f'{ME}.NMSop', f'{ME}.RoIAlign']
    model, loss = train(seeded(FasterHead), level, device, fp32_ops=names)
    assert loss == pytest.approx(reference, rel=2e-2)
    assert all(torch.isfinite(p).all() for p in model.parameters())


# -- coordinates -------------------------------------------------------------------------------------------------------


class GridHead(Head):
    """Deformable DETR: 16-bit values are sampled at FP32 locations."""

    def loss(self, x: Tensor) -> dict[str, Tensor]:
        grid = torch.linspace(-0.9, 0.9, 2 * 4 * 4 * 2, device=x.device).reshape(2, 4, 4, 2)
        sampled = F.grid_sample(self.cls(x), grid, align_corners=False)
        return dict(loss=self.loss_by_feat(sampled, x)['loss'])


@pytest.mark.parametrize('level', LEVELS)
def test_deformable_detr_samples_at_fp32_locations(level: str, device: torch.device) -> None:
    reference = train(seeded(GridHead), 'O0', device)[1]
    assert train(seeded(GridHead), level, device)[1] == pytest.approx(reference, rel=2e-2)


class AnchorHead(Head):
    """YOLOX, RetinaNet: anchors are made in the type of the scores, and bfloat16 has no 1001."""

    def predict_by_feat(self, scores: Tensor, boxes: Tensor) -> Any:
        points = torch.arange(1000, 1004, dtype=scores.dtype, device=scores.device)
        return [InstanceData(bboxes=points, scores=scores[0].flatten()[:4].sigmoid())]

    def loss_by_feat(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        points = torch.arange(1000, 1004, dtype=scores.dtype, device=scores.device)
        return dict(loss=(points - 1000).sum() / 6 + 0 * scores.sum() + 0 * boxes.sum())


@pytest.mark.parametrize('level', LEVELS)
def test_yolox_points_keep_their_places(level: str, device: torch.device) -> None:
    model, loss = train(AnchorHead(), level, device)
    assert loss == 1
    model.eval()
    (prediction,) = model.val_step(dict(inputs=images(device)))
    assert prediction.bboxes.tolist() == [1000.0, 1001.0, 1002.0, 1003.0]
    assert prediction.scores.dtype is torch.float32


moved_boxes: list[Tensor] = []


def batched_nms(boxes: Tensor, classes: Tensor) -> Tensor:
    """mmcv moves the boxes of each class apart by adding the largest coordinate times the class."""
    moved = boxes + classes.to(boxes)[:, None] * (boxes.max() + 1)
    moved_boxes.append(moved)
    return boxes * 1


class ManyClasses(Head):
    def loss(self, x: Tensor) -> dict[str, Tensor]:
        boxes = torch.tensor([[0.0, 0.0, 1333.0, 800.0]] * 2, device=x.device, dtype=x.dtype)
        kept = batched_nms(boxes, torch.tensor([0, 79], device=x.device))
        assert kept.dtype is x.dtype
        return dict(loss=self.cls(x).float().mean() + 0 * self.reg(x).float().mean())


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_batched_nms_of_80_classes(level: str, device: torch.device) -> None:
    """79 x 1334 is beyond float16. mmcv's function is in the registry; inside it, everything is FP32."""
    moved_boxes.clear()
    train(ManyClasses(), level, device)
    assert moved_boxes[0][1, 2].item() != 1333 + 79 * 1334
    train(ManyClasses(), level, device, fp32_ops=[f'{ME}.batched_nms'])
    assert moved_boxes[1].dtype is torch.float32
    if level == 'O2':  # bfloat16 rounds 1333 before it comes here
        assert moved_boxes[1][1, 2].item() == 1333 + 79 * 1334


class Extractor(nn.Module):
    """SingleRoIExtractor casts its boxes to the type of the maps; the class is in the registry for bfloat16."""

    def forward(self, maps: Tensor, rois: Tensor) -> tuple[Tensor, Tensor]:
        rois = rois.type_as(maps)
        self.rois = rois.detach().clone()
        return maps * 1, rois


class ExtractorHead(Head):
    def __init__(self) -> None:
        super().__init__()
        self.extractor = Extractor()

    def loss(self, x: Tensor) -> dict[str, Tensor]:
        pooled, _ = self.extractor(x, torch.tensor([[1001.0, 3.0]], device=x.device))
        assert pooled.dtype is x.dtype
        return dict(loss=self.cls(pooled).float().square().mean() + self.reg(pooled).float().square().mean())


@pytest.mark.parametrize('level', LEVELS)
def test_mask_rcnn_extractor_keeps_its_boxes(level: str, device: torch.device) -> None:
    model, _ = train(ExtractorHead(), level, device, fp32_ops=[f'{ME}.Extractor'])
    assert model.bbox_head.extractor.rois.tolist() == [[1001.0, 3.0]]


# -- losses ------------------------------------------------------------------------------------------------------------


class FocalLoss(nn.Module):
    """Not a loss of torch: sigmoid, logarithm and a sum, in the type of the scores."""

    def forward(self, scores: Tensor) -> Tensor:
        return -(1 - scores.sigmoid()).log().sum()


class RetinaHead(Head):
    def __init__(self) -> None:
        super().__init__()
        self.loss_cls = FocalLoss()

    def loss(self, x: Tensor) -> dict[str, Tensor]:
        scores, boxes = self(x)
        # 32,768 scores of 10 have a loss of 327,680
        loss = self.loss_cls(scores.repeat(1, 1, 16, 16) * 0 + 10)
        return dict(loss_cls=loss, loss_bbox=F.l1_loss(boxes, boxes * 0))


@pytest.mark.parametrize('level', ['O0', *LEVELS])
def test_retinanet_loss_module_at_every_level(level: str, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Detector(RetinaHead()).to(device)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    with wrapper.optim_context(model):
        losses = model(images(device), mode='loss')
    assert all(value.dtype is torch.float32 for value in losses.values())
    assert losses['loss_cls'].item() == pytest.approx(16384 * 10.0000454, rel=1e-3)


class FcnHead(Head):
    """mmsegmentation: logits are resized and summed up in ``loss_by_feat``."""

    def loss_by_feat(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        assert scores.dtype is torch.float32 and not torch.is_autocast_enabled(scores.device.type)
        target = torch.zeros(len(scores), 64, 64, dtype=torch.int64, device=scores.device)
        resized = F.interpolate(scores, (64, 64), mode='bilinear', align_corners=False)
        return dict(loss=F.cross_entropy(resized, target, reduction='sum'), acc=torch.tensor(70001))


@pytest.mark.parametrize('level', LEVELS)
def test_fcn_sums_its_loss_in_fp32(level: str, device: torch.device) -> None:
    model = Detector(FcnHead()).to(device)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    with wrapper.optim_context(model):
        losses = model(images(device), mode='loss')
    assert losses['loss'].dtype is torch.float32 and losses['loss'].isfinite() and losses['acc'].item() == 70001


# -- predictions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_labels_in_predictions_stay_integers(level: str, device: torch.device) -> None:
    model, _ = train(Head(), level, device)
    model.eval()
    for prediction in model.val_step(dict(inputs=images(device))):
        assert prediction.labels.dtype is torch.int64 and prediction.labels.min() >= 70000
        assert prediction.scores.dtype is torch.float32


@pytest.mark.parametrize('level', LEVELS)
def test_resnet_tested_at_the_level_predicts_fp32(level: str, device: torch.device) -> None:
    """mmpretrain's classifiers at O1: autocast's scores came out 16-bit from a test."""
    from types import SimpleNamespace

    from amp_wrapper.openmmlab.hooks import AmpInferenceHook

    class PlainHead(Head):
        def predict(self, x: Tensor) -> Any:
            return [InstanceData(scores=s) for s in self(x)[0]]

    model = Detector(PlainHead()).to(device).eval()
    lines: list[str] = []
    runner = SimpleNamespace(model=model, logger=SimpleNamespace(info=lines.append))
    AmpInferenceHook(level).before_test(runner)
    with torch.no_grad():
        predictions = model.test_step(dict(inputs=images(device)))
    assert model.seen is TYPES[level] and all(p.scores.dtype is torch.float32 for p in predictions)
    assert len(lines) == 1 and level in lines[0]


# -- recomputation -----------------------------------------------------------------------------------------------------


class CheckpointedHead(Head):
    """Swin and ViT with ``with_cp=True``: a segment is run again during the backward pass."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute

    def segment(self, x: Tensor) -> Tensor:
        scores, boxes = self(x)
        sampled = F.grid_sample(scores, torch.zeros(2, 2, 2, 2, device=x.device), align_corners=False)
        return F.l1_loss(boxes, boxes * 0 + 1) + F.mse_loss(sampled, sampled * 0)

    def loss(self, x: Tensor) -> dict[str, Tensor]:
        if self.recompute:
            return dict(loss=checkpoint(self.segment, x, use_reentrant=False))
        return dict(loss=self.segment(x))


@pytest.mark.parametrize('level', LEVELS)
def test_recomputed_losses_see_the_same_types(level: str, device: torch.device) -> None:
    weights = []
    for recompute in (True, False):
        torch.manual_seed(1)
        model, _ = train(CheckpointedHead(recompute), level, device)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))


# -- ways into a model that are not a call -----------------------------------------------------------------------------


class OwnTrainStep(Detector):
    """DETR-like wrappers and GANs: ``train_step`` calls parts of the model, never the model itself."""

    def train_step(self, data: dict[str, Any], optim_wrapper: AmpOptimWrapper) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            losses = self.bbox_head.loss(self.backbone(data['inputs']))
        self.loss_type = losses['loss'].dtype
        optim_wrapper.update_params(losses['loss'])
        return losses


@pytest.mark.parametrize('level', LEVELS)
def test_train_step_that_never_calls_the_model(level: str, device: torch.device) -> None:
    model = OwnTrainStep(FcnHead()).to(device)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    model.train_step(dict(inputs=images(device)), wrapper)
    assert model.loss_type is torch.float32


class LossInTrainStep(Detector):
    """GAN-like: the loss is written out in ``train_step``."""

    def train_step(self, data: dict[str, Any], optim_wrapper: AmpOptimWrapper) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            features = self.backbone(data['inputs'])
            loss = F.l1_loss(features, features * 0)
        self.loss_type = loss.dtype
        optim_wrapper.update_params(loss)
        return dict(loss=loss)


@pytest.mark.parametrize('level', LEVELS)
def test_loss_that_is_written_out_in_train_step(level: str, device: torch.device) -> None:
    model = LossInTrainStep(Head()).to(device)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    model.train_step(dict(inputs=images(device)), wrapper)
    assert model.loss_type is torch.float32


@pytest.mark.parametrize('level', LEVELS)
def test_model_whose_optimizer_owns_a_part(level: str, device: torch.device) -> None:
    """At O1 the parts that a wrapper owns are roots, and the head's methods are called by the model."""
    model = OwnTrainStep(FcnHead()).to(device)
    model.extra = nn.Parameter(torch.ones(1, device=device))
    parts = [*model.backbone.parameters(), *model.bbox_head.parameters()]
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(parts, lr=0.01))
    model.train_step(dict(inputs=images(device)), wrapper)
    assert model.loss_type is torch.float32


class DirectDetector(Detector):
    def predict(self, inputs: Tensor) -> Any:
        return self.bbox_head.predict(self.backbone(inputs))


class NmsHead(Head):
    def predict_by_feat(self, scores: Tensor, boxes: Tensor) -> Any:
        return NMSop.apply(boxes.flatten(2), scores.mean((1, 2, 3)))


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_predict_called_directly(level: str, device: torch.device) -> None:
    """mmdetection's ``model.predict(...)`` and ``model.bbox_head.predict(...)`` from a script."""
    model = DirectDetector(NmsHead()).to(device)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    wrapper.attach(model)
    model.eval()
    with torch.no_grad():
        assert model.predict(images(device)).dtype is torch.int64
        features = model.backbone(images(device))
        assert model.bbox_head.predict(features).dtype is torch.int64
    wrapper.detach()


def test_a_module_that_was_inserted_is_explained(device: torch.device) -> None:
    """``ModuleList.insert`` goes past torch's registration hooks; the error of types that follows says what happened."""
    model = Detector(Head()).to(device)
    wrapper = AmpOptimWrapper(opt_level='O2', optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    wrapper.attach(model)
    model.backbone.insert(1, nn.PReLU(8).to(device))
    with pytest.raises(AmpUsageError, match=r'did not have when it was cast \(backbone.1.weight.*detach\(\)'):
        model.train_step(dict(inputs=images(device)), wrapper)


def test_an_inserted_layer_that_the_optimizer_knows_is_trained(device: torch.device) -> None:
    """A product computes in 16-bit with the FP32 weight that joined, and its gradient is unscaled as others are."""

    def step(level: str) -> torch.Tensor:
        # with this seed no value lies so near to 0 that rounding changes its sign, and so the gradient of its loss
        torch.manual_seed(1)
        model = Detector(Head()).to(device)
        wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
        wrapper.attach(model)
        layer = nn.Conv2d(8, 8, 1).to(device)
        model.backbone.insert(1, layer)
        wrapper.optimizer.add_param_group(dict(params=list(layer.parameters())))
        before = layer.weight.detach().clone()
        model.train_step(dict(inputs=images(device)), wrapper)
        assert layer.weight.dtype is torch.float32
        wrapper.detach()
        return layer.weight.detach() - before

    expected = step('O0')
    assert expected.abs().max() > 0
    # float16 rounds to 2**-11 of a value, in a forward and a backward pass of a few layers
    assert (step('O2') - expected).abs().max() <= 2**-5 * expected.abs().max()


def test_an_interrupt_outside_of_training_is_forgotten(device: torch.device) -> None:
    """The next step must not inherit what a validation left open."""

    model = Detector(Head()).to(device)
    wrapper = AmpOptimWrapper(opt_level='O2', optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    wrapper.attach(model)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.bbox_head.cls.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(images(device))
    handle.remove()
    assert regions.count() == 0
    model.train_step(dict(inputs=images(device)), wrapper)
    assert regions.count() == 0
    handle = model.bbox_head.cls.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(images(device))
    wrapper.detach()
    assert regions.count() == 0


class Recomputing(nn.Module):
    """A discriminator with a checkpointed segment, whose wrapper names an op that the generator's does not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def segment(self, x: Tensor) -> Tensor:
        return named_op(self.fc(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.segment, x, use_reentrant=False).sum()


op_types: list[torch.dtype] = []


def named_op(x: Tensor) -> Tensor:
    op_types.append(x.dtype)
    return x * x


def test_backward_through_another_wrappers_model(device: torch.device) -> None:
    """CycleGAN-like: the generator's loss runs back through the discriminator's recomputed segment."""
    op_types.clear()
    generator, discriminator = nn.Linear(4, 4).to(device), Recomputing().to(device)
    first = AmpOptimWrapper(opt_level='O5', optimizer=torch.optim.SGD(generator.parameters(), lr=0.1))
    second = AmpOptimWrapper(
        opt_level='O5', optimizer=torch.optim.SGD(discriminator.parameters(), lr=0.1), fp32_ops=[f'{ME}.named_op']
    )
    first.attach(generator)
    second.attach(discriminator)
    with first.optim_context(generator):
        loss = discriminator(generator(torch.ones(2, 4, device=device)))
    first.update_params(loss)
    assert op_types == [torch.float32, torch.float32]


class TwoLosses(nn.Module):
    """A loss module and a functional loss behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.loss = nn.MSELoss()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x).relu()
        return self.loss(y, torch.zeros_like(y)), F.cross_entropy(
            y, torch.zeros(len(y), dtype=torch.long, device=y.device)
        )


@pytest.mark.parametrize('whole', [False, True])
@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O4', 'O5'])
def test_compiled_by_hand_it_computes_the_same(level: str, whole: bool, device: torch.device) -> None:
    """Regions that run in FP32 break the graph of torch.compile, and stay in force."""
    torch._dynamo.reset()
    model = TwoLosses().to(device)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=1.0)
    wrapper.attach(model)
    inputs = torch.randn(2, 4, device=device)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        with wrapper.optim_context(model):
            return model(x)

    expected = step(inputs)
    if whole:
        got = torch.compile(step, backend='eager')(inputs)
    else:
        compiled = torch.compile(model, backend='eager')
        with wrapper._engine.forward_context(model):
            got = compiled(inputs)
    assert [value.dtype for value in got] == [torch.float32] * 2
    assert all(a.equal(b) for a, b in zip(got, expected))
