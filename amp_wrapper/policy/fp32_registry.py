"""What runs in FP32 at every opt level: the table, and how a dotted name finds its object.

The table holds names, not objects: packages that are not installed, or not imported, cost nothing. How members are made
to run in FP32 is :mod:`amp_wrapper.autocast.patching` (functions) and :mod:`amp_wrapper.casting.plan` (modules).
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from . import fp32_linalg
from .nested import HALF_TYPES

_BOTH = HALF_TYPES
_BF16 = frozenset({torch.bfloat16})
_NEITHER: frozenset[torch.dtype] = frozenset()

#: Output rules of :class:`Fp32Op`.
CALLER, FLOAT32 = 'caller', 'float32'
#: As 'caller', but FP32 where autocast is on, as the results of its own FP32 ops are.
MODEL = 'model'
#: Further ones, for members that O1 and O4 of the functional API treat otherwise: FP32 where any input is, and no 16-bit
#: input at all.
WIDEST, REFUSED = 'widest', 'refused'


@dataclasses.dataclass(frozen=True)
class Fp32Op:
    """One member of the registry.

    Attributes:
        name: Dotted name of a function, a method, a :class:`torch.autograd.Function` or an ``nn.Module`` class.
        output: 'caller' gives FP32 results back in the type of the first floating tensor of the call; 'model' does so
            where autocast is off; 'float32' leaves them, for losses, whose sums a 16-bit number could not hold.
            :data:`CAST_OPS` has two more.
        cpu: The 16-bit types that it must not compute in on a CPU.
        cuda: The same for every other device.
        reason: Why it is here.
    """

    name: str
    output: str = CALLER
    cpu: frozenset[torch.dtype] = _BOTH
    cuda: frozenset[torch.dtype] = _BOTH
    reason: str = 'named in the configuration'

    def avoids(self, device_type: str) -> frozenset[torch.dtype]:
        """The 16-bit types that it must not compute in there."""
        return self.cpu if device_type == 'cpu' else self.cuda


def _losses() -> Iterator[Fp32Op]:
    reason = 'a sum of 16-bit losses overflows, and their logarithms lose all digits'
    functional = (
        'binary_cross_entropy',
        'binary_cross_entropy_with_logits',
        'cosine_embedding_loss',
        'cross_entropy',
        'ctc_loss',
        'gaussian_nll_loss',
        'hinge_embedding_loss',
        'huber_loss',
        'kl_div',
        'l1_loss',
        'margin_ranking_loss',
        'mse_loss',
        'multi_margin_loss',
        'multilabel_margin_loss',
        'multilabel_soft_margin_loss',
        'nll_loss',
        'poisson_nll_loss',
        'smooth_l1_loss',
        'soft_margin_loss',
        'triplet_margin_loss',
        'triplet_margin_with_distance_loss',
    )
    for name in functional:
        yield Fp32Op(f'torch.nn.functional.{name}', FLOAT32, reason=reason)
    # what those call through a module attribute: found even where a model kept a reference to the function above
    for name in (
        'binary_cross_entropy_with_logits',
        'cosine_embedding_loss',
        'ctc_loss',
        'hinge_embedding_loss',
        'kl_div',
        'margin_ranking_loss',
        'poisson_nll_loss',
        'triplet_margin_loss',
    ):
        yield Fp32Op(f'torch.{name}', FLOAT32, reason=reason)
    for name in (
        'binary_cross_entropy',
        'cross_entropy_loss',
        'huber_loss',
        'l1_loss',
        'mse_loss',
        'multi_margin_loss',
        'multilabel_margin_loss',
        'nll_loss_nd',
        'smooth_l1_loss',
        'soft_margin_loss',
    ):
        yield Fp32Op(f'torch._C._nn.{name}', FLOAT32, reason=reason)


def _torch_functions() -> Iterator[Fp32Op]:
    reason = 'wants one type for values and coordinates, and 16-bit coordinates are off by pixels'
    yield Fp32Op('torch.nn.functional.grid_sample', reason=reason)
    yield Fp32Op('torch.grid_sampler', reason=reason)
    yield Fp32Op('torch.nn.functional.local_response_norm', reason='squares overflow float16 from 256 on')

    reason = 'has no 16-bit kernel, or one whose results are far off'
    for name in fp32_linalg.functions():
        yield Fp32Op(name, MODEL, reason=reason)
    reason = 'divides by norms, inverts or exponentiates a weight'
    yield Fp32Op('torch.nn.utils.parametrize.ParametrizationList', reason=reason)
    yield Fp32Op('torch.nn.utils.weight_norm.WeightNorm.compute_weight', MODEL, reason=reason)
    yield Fp32Op('torch.nn.utils.spectral_norm.SpectralNorm.compute_weight', MODEL, reason=reason)
    # np.asarray(tensor) ends there, too
    yield Fp32Op(
        'torch.Tensor.numpy', FLOAT32, reason='NumPy has no bfloat16, and computes in float16 where it is given float16'
    )


# Read from the sources of mmcv 2.1.0 (CUDA) and tried with its compiled ops (CPU). No kernel there takes bfloat16.
_MMCV: tuple[tuple[str, str, frozenset[torch.dtype], frozenset[torch.dtype], tuple[str, ...]], ...] = (
    (
        'its kernels read and write float32',
        CALLER,
        _BOTH,
        _BOTH,
        (
            'chamfer_distance.ChamferDistanceFunction',
            'diff_iou_rotated.SortVertices',
            'furthest_point_sample.FurthestPointSampling',
            'furthest_point_sample.FurthestPointSamplingWithDist',
            'knn.KNN',
            'nms.NMSop',
            'nms.SoftNMSop',
            'nms.nms_match',
            'pixel_group.pixel_group',
            'points_in_polygons.points_in_polygons',
            'scatter_points._DynamicScatter',
            'iou3d.boxes_overlap_bev',
            'iou3d.nms3d',
            'iou3d.nms3d_normal',
        ),
    ),
    (
        'areas and offsets of boxes overflow float16 (300 x 300 is too large), and round to many pixels in bfloat16',
        CALLER,
        _BOTH,
        _BOTH,
        (
            'bbox.bbox_overlaps',
            'box_iou_quadri.box_iou_quadri',
            'box_iou_rotated.box_iou_rotated',
            'convex_iou.convex_giou',
            'convex_iou.convex_iou',
            'diff_iou_rotated.diff_iou_rotated_2d',
            'diff_iou_rotated.diff_iou_rotated_3d',
            'iou3d.boxes_iou3d',
            'min_area_polygons.min_area_polygons',
            'nms.batched_nms',
            'nms.nms',
            'nms.nms_quadri',
            'nms.nms_rotated',
            'nms.soft_nms',
            'points_in_boxes.points_in_boxes_all',
            'points_in_boxes.points_in_boxes_part',
        ),
    ),
    (
        'samples a map at coordinates, which its float16 kernels compute in float16: off by a quarter of a pixel from 256 on',
        CALLER,
        _BOTH,
        _BOTH,
        (
            'bezier_align.BezierAlignFunction',
            'border_align.BorderAlignFunction',
            'deform_conv.DeformConv2dFunction',
            'deform_roi_pool.DeformRoIPoolFunction',
            'modulated_deform_conv.ModulatedDeformConv2dFunction',
            'multi_scale_deform_attn.MultiScaleDeformableAttnFunction',
            'multi_scale_deform_attn.multi_scale_deformable_attn_pytorch',
            'point_sample.bilinear_grid_sample',
            'point_sample.point_sample',
            'prroi_pool.PrRoIPoolFunction',
            'riroi_align_rotated.RiRoIAlignRotatedFunction',
            'roi_align.RoIAlignFunction',
            'roi_align_rotated.RoIAlignRotatedFunction',
            'roi_pool.RoIPoolFunction',
            'roiaware_pool3d.RoIAwarePool3dFunction',
            'roipoint_pool3d.RoIPointPool3dFunction',
            'rotated_feature_align.RotatedFeatureAlignFunction',
        ),
    ),
    (
        'a loss whose float16 kernel takes the logarithm of 0 at saturated scores',
        FLOAT32,
        _BOTH,
        _BOTH,
        ('focal_loss.SigmoidFocalLossFunction', 'focal_loss.SoftmaxFocalLossFunction'),
    ),
    (
        'no bfloat16 kernel',
        CALLER,
        _BF16,
        _BF16,
        (
            'active_rotated_filter.ActiveRotatedFilterFunction',
            'assign_score_withk.AssignScoreWithK',
            'ball_query.BallQuery',
            'carafe.CARAFEFunction',
            'carafe.CARAFENaiveFunction',
            'correlation.CorrelationFunction',
            'gather_points.GatherPoints',
            'group_points.GroupingOperation',
            'masked_conv.MaskedConv2dFunction',
            'sparse_functional.SparseConvFunction',
            'sparse_functional.SparseInverseConvFunction',
            'sparse_functional.SparseMaxPoolFunction',
            'sparse_functional.SubMConvFunction',
            'sync_bn.SyncBatchNormFunction',
            'three_interpolate.ThreeInterpolate',
            'three_nn.ThreeNN',
            'tin_shift.TINShiftFunction',
        ),
    ),
    (
        'no bfloat16 kernel on a GPU; on a CPU it is plain torch',
        CALLER,
        _NEITHER,
        _BF16,
        (
            'bias_act.bias_act',
            'fused_bias_leakyrelu.FusedBiasLeakyReLUFunction',
            'fused_bias_leakyrelu.FusedBiasLeakyReLUFunctionBackward',
            'upfirdn2d.upfirdn2d',
        ),
    ),
    (
        'its filters are float32, which autocast does not respect',
        CALLER,
        _BOTH,
        _BF16,
        ('filtered_lrelu.filtered_lrelu',),
    ),
    ('no 16-bit kernel on a GPU', CALLER, _NEITHER, _BOTH, ('psa_mask.PSAMaskFunction',)),
    ('no 16-bit kernel on a GPU, no bfloat16 on a CPU', CALLER, _BF16, _BOTH, ('voxelize._Voxelization',)),
)


def _mmcv() -> Iterator[Fp32Op]:
    for reason, output, cpu, cuda, names in _MMCV:
        for name in names:
            yield Fp32Op(f'mmcv.ops.{name}', output, cpu, cuda, reason)


def _mmdet() -> Iterator[Fp32Op]:
    rounds = 'casts its boxes to the type of the feature maps, and bfloat16 boxes are off by pixels from 256 on'
    for name in ('SingleRoIExtractor', 'GenericRoIExtractor'):
        yield Fp32Op(f'mmdet.models.roi_heads.roi_extractors.{name}', cpu=_BF16, cuda=_BF16, reason=rounds)
    areas = 'areas of boxes overflow float16 and round in bfloat16'
    yield Fp32Op('mmdet.structures.bbox.bbox_overlaps', reason=areas)


def _table() -> dict[str, Fp32Op]:
    ops = [*_losses(), *_torch_functions(), *_mmcv(), *_mmdet()]
    return {op.name: op for op in ops}


#: The registry as it is delivered, by name.
FP32_OPS = MappingProxyType(_table())

#: Why, and what to write instead.
BCE_REASON = (
    'its logarithms of 0 and 1 are infinite in float16, and its gradients overflow. Write binary_cross_entropy_with_logits or '
    'nn.BCEWithLogitsLoss, without the sigmoid before it; or make sure that its input is FP32: input.float(), or '
    "amp.register_float_function(torch, 'sigmoid')."
)
#: Members whose entry is another one where the functional API casts op by op, as autocast does on a GPU.
CAST_OPS = MappingProxyType(
    {
        op.name: op
        for op in (
            Fp32Op('torch.nn.functional.grid_sample', WIDEST, reason='autocast promotes it'),
            Fp32Op('torch.grid_sampler', WIDEST, reason='autocast promotes it'),
            Fp32Op(
                'torch.nn.functional.local_response_norm', FLOAT32, reason='autocast gives back the FP32 of its power'
            ),
            Fp32Op('torch.nn.functional.binary_cross_entropy', REFUSED, reason=BCE_REASON),
            Fp32Op('torch._C._nn.binary_cross_entropy', REFUSED, reason=BCE_REASON),
        )
    }
)

#: Methods of modules that run in FP32 by their name. OpenMMLab's heads turn network outputs into losses and predictions
#: there: boxes, anchors, sums and scores, which mmdetection 2 kept in FP32 with ``force_fp32``.
FP32_METHODS: tuple[str, ...] = ('loss_by_feat', 'loss_and_target', 'predict_by_feat')
METHOD_REASON = 'turns network outputs into losses or predictions'


def find(name: str, load: bool) -> Any:
    """The object behind a dotted name.

    A package may shadow a module of its own with a function (``mmcv.ops.nms``): what is no module wins.

    Args:
        name: Such as 'mmcv.ops.nms' or 'torch.nn.LayerNorm'.
        load: Whether modules on the way may be imported; False finds only what is imported already.

    Returns:
        The object, or None where there is none.
    """
    return _find(name, load)[0]


def owner(name: str) -> tuple[Any, str]:
    """Where the last part of ``name`` is an attribute: (module or class, attribute name)."""
    found = _find(name, load=False)
    return found[1], name.rpartition('.')[2]


def _find(name: str, load: bool) -> tuple[Any, Any]:
    parts = name.split('.')
    if not all(parts):
        return None, None
    for cut in range(len(parts) - 1, 0, -1):
        value: Any = _module('.'.join(parts[:cut]), load)
        if value is None:
            continue
        holder = value
        for part in parts[cut:]:
            holder, value = value, getattr(value, part, None)
            if value is None:
                break
        if value is not None and not isinstance(value, ModuleType):
            return value, holder
    return None, None


def _module(name: str, load: bool) -> ModuleType | None:
    module = sys.modules.get(name)
    if module is None and load:
        try:
            module = importlib.import_module(name)
        except Exception:  # a package may fail in any way; problems_of says which
            return None
    return module


def is_function_class(value: Any) -> bool:
    """Whether ``value`` is a :class:`torch.autograd.Function` subclass."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def is_module_class(value: Any) -> bool:
    """Whether ``value`` is an ``nn.Module`` subclass."""
    return isinstance(value, type) and issubclass(value, nn.Module)


def problems_of(names: tuple[str, ...]) -> list[str]:
    """What is wrong with names from a configuration, one sentence each; imports the modules that they name."""
    problems = []
    for name in names:
        label = f'fp32_ops={name!r}'
        if '.' not in name.strip('.'):
            problems.append(f"{label} must be a dotted name, such as 'mmcv.ops.nms' or 'torch.nn.functional.softmax'.")
            continue
        value = find(name, load=True)
        if value is None:
            problems.append(f'{label} {_why_missing(name)}.')
        elif isinstance(value, type) and not is_function_class(value) and not is_module_class(value):
            methods = [key for key in vars(value) if callable(getattr(value, key)) and not key.startswith('_')]
            example = f', such as {name}.{methods[0]!s}' if methods else ''
            problems.append(
                f'{label} is a class but no nn.Module and no autograd Function: name one of its methods{example}.'
            )
        elif value is nn.Module or value is torch.autograd.Function:
            problems.append(f'{label} is the base of every class of its kind: name one of them.')
        elif not callable(value):
            problems.append(
                f'{label} cannot be called: it is a {type(value).__name__}. Name a function, a method or a class.'
            )
        elif not isinstance(value, type) and not can_be_replaced(*owner(name)):
            problems.append(
                f'{label} belongs to a built-in type and cannot be replaced: name the function that calls it.'
            )
    return problems


def can_be_replaced(holder: Any, attribute: str) -> bool:
    """Whether an attribute may be set on a module, class or object; tried with what is there."""
    try:
        own = attribute in vars(holder)
        setattr(holder, attribute, vars(holder)[attribute] if own else getattr(holder, attribute))
        if not own:
            delattr(holder, attribute)
    except (AttributeError, TypeError):
        return False
    return True


def _why_missing(name: str) -> str:
    """Why a name was not found, with near misses where there are some."""
    parts = name.split('.')
    if not all(parts):
        return 'has an empty part: write the name without double, leading or trailing dots'
    if isinstance(_module(name, load=True), ModuleType):
        return 'is a module: name a function or a class in it'
    try:
        installed = parts[0] in sys.modules or importlib.util.find_spec(parts[0]) is not None
    except ValueError:
        installed = True
    if not installed:
        return f'does not exist: {parts[0]} is not installed'
    for cut in range(len(parts) - 1, 0, -1):
        prefix = '.'.join(parts[:cut])
        holder: Any = _module(prefix, load=True) or find(prefix, load=True)
        if holder is not None:
            break
    else:
        return f'does not exist{_import_failure(parts[0])}'
    missing = parts[cut]
    failure = _import_failure(f'{prefix}.{missing}') if isinstance(holder, ModuleType) and cut < len(parts) - 1 else ''
    if parts[0] == 'mmcv' and missing == 'ops':
        remedy = 'this mmcv comes without its compiled ops (mmcv-lite). Install mmcv (full) in its place'
        return f'does not exist{failure}: {remedy}'
    close = difflib.get_close_matches(missing, dir(holder), n=3, cutoff=0.5)
    hint = f' (did you mean {" or ".join(repr(f"{prefix}.{key}") for key in close)}?)' if close else ''
    return f'does not exist{failure or hint}'


def _import_failure(module: str) -> str:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return '' if error.name == module else f': {error}'
    except Exception as error:
        return f': {module} cannot be imported ({type(error).__name__}: {error})'
    return ''
