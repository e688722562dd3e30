"""What runs in FP32 at every opt level, as a table.

The table holds names, not objects: packages that are not installed, or not imported, cost nothing; :mod:`.lookup` finds the
objects. How they are made to run in FP32 is :mod:`amp_wrapper.autocast.patching` (functions) and
:mod:`amp_wrapper.casting.plan` (modules).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from .nested import HALF_TYPES

_BOTH = HALF_TYPES
_BF16 = frozenset({torch.bfloat16})
_NEITHER: frozenset[torch.dtype] = frozenset()

#: Output rules of :class:`Fp32Op`.
CALLER, FLOAT32 = 'caller', 'float32'
#: As 'caller', but FP32 where autocast is on, as the results of its own FP32 ops are.
MODEL = 'model'
#: For members that O1 and O4 of the functional API treat otherwise: FP32 where any input is.
WIDEST = 'widest'
#: Not in FP32 at all: see :data:`RANGE_OPS`.
CLAMPED = 'clamped'


@dataclasses.dataclass(frozen=True)
class Fp32Op:
    """One entry of the registry.

    Attributes:
        name: Dotted name of a function, a method, a :class:`torch.autograd.Function` or an ``nn.Module`` class.
        output: 'caller' gives FP32 results back in the type of the first floating tensor of the call; 'model' does so
            where autocast is off; 'float32' leaves them, for losses, whose sums a 16-bit number could not hold.
            :data:`CAST_OPS` and :data:`RANGE_OPS` have one more each.
        cpu: The 16-bit types that it must not compute in on a CPU.
        cuda: The same for every other device.
        reason: Why it is here.
        warning: What is said once for each model, where the first tensor of a call is 16-bit.
    """

    name: str
    output: str = CALLER
    cpu: frozenset[torch.dtype] = _BOTH
    cuda: frozenset[torch.dtype] = _BOTH
    reason: str = 'named in the configuration'
    warning: str = ''

    def avoids(self, device_type: str) -> frozenset[torch.dtype]:
        """The 16-bit types that it must not compute in there."""
        return self.cpu if device_type == 'cpu' else self.cuda


#: Functions of ``torch.linalg`` that stay 16-bit: products of matrices, which 16-bit numbers are for; a view; and sums of
#: powers, whose kernels add in float32 already.
IN_16_BIT = frozenset({'matmul', 'multi_dot', 'diagonal', 'vector_norm'})

# functions of torch, most of them also methods of tensors, by which the same algorithms are reached
_LINALG_ALIASES = """
    cholesky cholesky_inverse cholesky_solve det frobenius_norm geqrf inverse lobpcg logdet lu lu_solve lu_unpack
    matrix_exp matrix_power norm_except_dim nuclear_norm orgqr ormqr pca_lowrank pinverse qr slogdet svd svd_lowrank
    triangular_solve _weight_norm
"""


def linalg_functions() -> Iterator[str]:
    """Dotted names: all of ``torch.linalg`` that this torch has, but for :data:`IN_16_BIT`, and their other names.

    Most of them have no 16-bit kernel; ``matrix_exp`` on a CPU has one that returns garbage; the others divide by what 16-bit
    numbers cancel to.
    """
    for name, value in vars(torch.linalg).items():
        if not name.startswith('_') and not isinstance(value, type) and callable(value) and name not in IN_16_BIT:
            yield f'torch.linalg.{name}'
    for name in _LINALG_ALIASES.split():
        if hasattr(torch, name):
            yield f'torch.{name}'
        if hasattr(torch.Tensor, name):
            yield f'torch.Tensor.{name}'


def fourier_functions() -> Iterator[str]:
    """Names in ``torch``: all of ``torch.fft``, but for those that move numbers or give frequencies, and its kin."""
    for name, value in vars(torch.fft).items():
        if not isinstance(value, type) and callable(value) and not name.endswith(('shift', 'freq', '_add_docstr')):
            yield f'fft.{name}'
    yield from ('stft', 'istft', 'Tensor.stft', 'Tensor.istft')


def _ops(
    prefix: str,
    names: str,
    reason: str,
    output: str = CALLER,
    cpu: frozenset[torch.dtype] = _BOTH,
    cuda: frozenset[torch.dtype] = _BOTH,
) -> Iterator[Fp32Op]:
    for name in names.split():
        yield Fp32Op(prefix + name, output, cpu, cuda, reason)


_LOSS = 'a sum of 16-bit losses overflows, and their logarithms lose all digits'
_WEIGHT = 'divides by norms, inverts or exponentiates a weight'
_FUNCTIONAL_LOSSES = """
    binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss gaussian_nll_loss
    hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
    triplet_margin_with_distance_loss
"""
# what those call through a module attribute: found even where a model kept a reference to the function above
_TORCH_LOSSES = """
    binary_cross_entropy_with_logits cosine_embedding_loss ctc_loss hinge_embedding_loss kl_div margin_ranking_loss
    poisson_nll_loss triplet_margin_loss
"""
_INNER_LOSSES = """
    cross_entropy_loss huber_loss l1_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss_nd smooth_l1_loss
    soft_margin_loss
"""
_PROBABILITY_LOSSES = 'nn.functional.binary_cross_entropy _C._nn.binary_cross_entropy'
#: What is wrong with 16-bit probabilities, and what to write instead.
BCE_WARNING = (
    'binary_cross_entropy (nn.BCELoss) was given 16-bit probabilities. A saturated 16-bit sigmoid is exactly 0 or 1: the loss '
    'is 100 there, whatever the score, and its gradient is 0 or NaN. It is computed in FP32, which comes too late. Write '
    'binary_cross_entropy_with_logits or nn.BCEWithLogitsLoss, without the sigmoid before it.'
)
_NO_KERNEL = 'has no 16-bit kernel, or one whose complex results have none'
_WITHOUT_KERNEL = """
    cdist complex histogram histogramdd nanquantile nn.functional.pdist pdist polar quantile view_as_complex
    Tensor.histogram Tensor.nanquantile Tensor.quantile
"""
_WITHOUT_CPU_KERNEL = 'nn.functional.avg_pool3d _C._nn._upsample_bilinear2d_aa _C._nn._upsample_bicubic2d_aa'
_WITH_EPS = 'nn.functional.normalize nn.functional.cosine_similarity'
_COMPUTED_WEIGHTS = 'weight_norm.WeightNorm.compute_weight spectral_norm.SpectralNorm.compute_weight'
_TORCH = (
    *_ops('torch.nn.functional.', _FUNCTIONAL_LOSSES, _LOSS, FLOAT32),
    *_ops('torch.', _TORCH_LOSSES, _LOSS, FLOAT32),
    *_ops('torch._C._nn.', _INNER_LOSSES, _LOSS, FLOAT32),
    *(dataclasses.replace(op, warning=BCE_WARNING) for op in _ops('torch.', _PROBABILITY_LOSSES, _LOSS, FLOAT32)),
    *_ops(
        'torch.',
        'nn.functional.grid_sample grid_sampler',
        'wants one type for values and coordinates, and 16-bit coordinates are off by pixels',
    ),
    *_ops('torch.nn.functional.', 'local_response_norm', 'squares overflow float16 from 256 on'),
    *_ops('', ' '.join(linalg_functions()), 'has no 16-bit kernel, or one whose results are far off', MODEL),
    *_ops('torch.', ' '.join(fourier_functions()), 'has no 16-bit kernel, or one for powers of two alone', MODEL),
    *_ops('torch.', _WITHOUT_KERNEL, _NO_KERNEL, MODEL),
    *_ops('torch.', _WITHOUT_CPU_KERNEL, 'no 16-bit kernel on a CPU', MODEL, cuda=_NEITHER),
    *_ops('torch.', _WITH_EPS, 'its eps is 0 in float16, and squares overflow', MODEL),
    *_ops('torch.nn.utils.parametrize.', 'ParametrizationList', _WEIGHT),
    *_ops('torch.nn.utils.', _COMPUTED_WEIGHTS, _WEIGHT, MODEL),
    # np.asarray(tensor) ends there, too
    *_ops(
        'torch.Tensor.', 'numpy', 'NumPy has no bfloat16, and computes in float16 where it is given float16', FLOAT32
    ),
)

# Read from the sources of mmcv 2.1.0 (CUDA) and tried with its compiled ops (CPU). No kernel there takes bfloat16.
_FLOAT32_KERNELS = """
    chamfer_distance.ChamferDistanceFunction diff_iou_rotated.SortVertices furthest_point_sample.FurthestPointSampling
    furthest_point_sample.FurthestPointSamplingWithDist knn.KNN nms.NMSop nms.SoftNMSop nms.nms_match pixel_group.pixel_group
    points_in_polygons.points_in_polygons scatter_points._DynamicScatter iou3d.boxes_overlap_bev iou3d.nms3d
    iou3d.nms3d_normal
"""
_BOXES = """
    bbox.bbox_overlaps box_iou_quadri.box_iou_quadri box_iou_rotated.box_iou_rotated convex_iou.convex_giou
    convex_iou.convex_iou diff_iou_rotated.diff_iou_rotated_2d diff_iou_rotated.diff_iou_rotated_3d iou3d.boxes_iou3d
    min_area_polygons.min_area_polygons nms.batched_nms nms.nms nms.nms_quadri nms.nms_rotated nms.soft_nms
    points_in_boxes.points_in_boxes_all points_in_boxes.points_in_boxes_part
"""
_SAMPLERS = """
    bezier_align.BezierAlignFunction border_align.BorderAlignFunction deform_conv.DeformConv2dFunction
    deform_roi_pool.DeformRoIPoolFunction modulated_deform_conv.ModulatedDeformConv2dFunction
    multi_scale_deform_attn.MultiScaleDeformableAttnFunction multi_scale_deform_attn.multi_scale_deformable_attn_pytorch
    point_sample.bilinear_grid_sample point_sample.point_sample prroi_pool.PrRoIPoolFunction
    riroi_align_rotated.RiRoIAlignRotatedFunction roi_align.RoIAlignFunction roi_align_rotated.RoIAlignRotatedFunction
    roi_pool.RoIPoolFunction roiaware_pool3d.RoIAwarePool3dFunction roipoint_pool3d.RoIPointPool3dFunction
    rotated_feature_align.RotatedFeatureAlignFunction
"""
_WITHOUT_BFLOAT16 = """
    active_rotated_filter.ActiveRotatedFilterFunction assign_score_withk.AssignScoreWithK ball_query.BallQuery
    carafe.CARAFEFunction carafe.CARAFENaiveFunction correlation.CorrelationFunction gather_points.GatherPoints
    group_points.GroupingOperation masked_conv.MaskedConv2dFunction sparse_functional.SparseConvFunction
    sparse_functional.SparseInverseConvFunction sparse_functional.SparseMaxPoolFunction sparse_functional.SubMConvFunction
    sync_bn.SyncBatchNormFunction three_interpolate.ThreeInterpolate three_nn.ThreeNN tin_shift.TINShiftFunction
"""
_PLAIN_ON_CPU = """
    bias_act.bias_act fused_bias_leakyrelu.FusedBiasLeakyReLUFunction
    fused_bias_leakyrelu.FusedBiasLeakyReLUFunctionBackward upfirdn2d.upfirdn2d
"""
_MMCV = (
    *_ops('mmcv.ops.', _FLOAT32_KERNELS, 'its kernels read and write float32'),
    *_ops(
        'mmcv.ops.',
        _BOXES,
        'areas and offsets of boxes overflow float16 (300 x 300 is too large), and round to many pixels in bfloat16',
    ),
    *_ops(
        'mmcv.ops.',
        _SAMPLERS,
        'samples a map at coordinates, which its float16 kernels compute in float16: off by a quarter of a pixel from 256 on',
    ),
    *_ops(
        'mmcv.ops.focal_loss.',
        'SigmoidFocalLossFunction SoftmaxFocalLossFunction',
        'a loss whose float16 kernel takes the logarithm of 0 at saturated scores',
        FLOAT32,
    ),
    *_ops('mmcv.ops.', _WITHOUT_BFLOAT16, 'no bfloat16 kernel', cpu=_BF16, cuda=_BF16),
    *_ops(
        'mmcv.ops.', _PLAIN_ON_CPU, 'no bfloat16 kernel on a GPU; on a CPU it is plain torch', cpu=_NEITHER, cuda=_BF16
    ),
    *_ops(
        'mmcv.ops.',
        'filtered_lrelu.filtered_lrelu',
        'its filters are float32, which autocast does not respect',
        cuda=_BF16,
    ),
    *_ops('mmcv.ops.', 'psa_mask.PSAMaskFunction', 'no 16-bit kernel on a GPU', cpu=_NEITHER),
    *_ops('mmcv.ops.', 'voxelize._Voxelization', 'no 16-bit kernel on a GPU, no bfloat16 on a CPU', cpu=_BF16),
)
_MMDET = (
    *_ops(
        'mmdet.models.roi_heads.roi_extractors.',
        'SingleRoIExtractor GenericRoIExtractor',
        'casts its boxes to the type of the feature maps, and bfloat16 boxes are off by pixels from 256 on',
        cpu=_BF16,
        cuda=_BF16,
    ),
    *_ops('mmdet.structures.bbox.', 'bbox_overlaps', 'areas of boxes overflow float16 and round in bfloat16'),
)

#: The registry as it is delivered, by name.
FP32_OPS: Mapping[str, Fp32Op] = MappingProxyType({op.name: op for op in (*_TORCH, *_MMCV, *_MMDET)})

_FILLS = """
    _C._nn.pad clamp clamp_max clamp_min fill full_like index_fill masked_fill scatter where
    Tensor.clamp Tensor.clamp_ Tensor.clamp_max Tensor.clamp_min Tensor.fill_ Tensor.index_fill Tensor.index_fill_
    Tensor.masked_fill Tensor.masked_fill_ Tensor.new_full Tensor.scatter Tensor.scatter_ Tensor.where
"""
#: Functions that write numbers into 16-bit tensors, which refuse what they cannot hold, or make infinities of it: finite
#: numbers beyond the range become the largest of the type.
RANGE_OPS: Mapping[str, Fp32Op] = MappingProxyType(
    {op.name: op for op in _ops('torch.', _FILLS, 'writes numbers into 16-bit tensors', CLAMPED)}
)

_CAST = (
    *_ops('torch.', 'nn.functional.grid_sample grid_sampler', 'autocast promotes it', WIDEST),
    *_ops('torch.nn.functional.', 'local_response_norm', 'autocast gives back the FP32 of its power', FLOAT32),
)
#: Members whose entry is another one where the functional API casts op by op, as autocast does on a GPU.
CAST_OPS: Mapping[str, Fp32Op] = MappingProxyType({op.name: op for op in _CAST})

#: Methods of modules that run in FP32 by their name. OpenMMLab's heads turn network outputs into losses and predictions
#: there: boxes, anchors, sums and scores, which mmdetection 2 kept in FP32 with ``force_fp32``.
FP32_METHODS: tuple[str, ...] = ('loss_by_feat', 'loss_and_target', 'predict_by_feat')
METHOD_REASON = 'turns network outputs into losses or predictions'
