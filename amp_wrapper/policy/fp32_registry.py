"""What runs in FP32 at every opt level, as a table.

The table holds names, not objects: packages that are not installed, or not imported, cost nothing; :mod:`.lookup` finds the
objects. How they are made to run in FP32 is :mod:`amp_wrapper.casting.kernels` (functions of torch),
:mod:`amp_wrapper.casting.functions` (functions of Python) and :mod:`amp_wrapper.casting.plan` (modules).
"""

from __future__ import annotations

import dataclasses
from types import ModuleType

import torch

from . import lookup
from .nested import HALF_TYPES

_BF16 = frozenset({torch.bfloat16})

#: Output rules of :class:`Fp32Op`.
CALLER, FLOAT32 = 'caller', 'float32'
#: As 'caller', but FP32 where autocast is on, as the results of its own FP32 ops are.
MODEL = 'model'


@dataclasses.dataclass(frozen=True)
class Fp32Op:
    """One entry of the registry.

    Attributes:
        name: Dotted name of a function, a method, a :class:`torch.autograd.Function` or an ``nn.Module`` class.
        reason: Why it is here.
        output: 'caller' returns FP32 results in the type of the first floating tensor of the call; 'model' does so where
            autocast is off; 'float32' leaves them, for losses, whose sums a 16-bit number could not hold.
        types: The 16-bit types that it must not compute in.
        warning: The warning that is given once for each model, where the first tensor of a call is 16-bit.
    """

    name: str
    reason: str = 'named in the configuration'
    output: str = CALLER
    types: frozenset[torch.dtype] = HALF_TYPES
    warning: str = ''


def _functions_of(module: ModuleType, but: str) -> str:
    """The names of the functions that this torch has in a module, without some."""
    prefix, others = module.__name__.removeprefix('torch.'), but.split()
    functions = (key for key, value in vars(module).items() if callable(value) and not isinstance(value, type))
    return ' '.join(f'{prefix}.{key}' for key in functions if key[0] != '_' and key not in others)


#: What is wrong with 16-bit probabilities, and what to write instead.
BCE_WARNING = (
    'binary_cross_entropy (nn.BCELoss) was given 16-bit probabilities. A saturated 16-bit sigmoid is exactly 0 or 1: the loss '
    'is 100 there, whatever the score, and its gradient is 0 or NaN. It is computed in FP32, which comes too late. Write '
    'binary_cross_entropy_with_logits or nn.BCEWithLogitsLoss, without the sigmoid before it.'
)
_LOSS = 'a sum of 16-bit losses overflows, and their logarithms lose all digits'
# a function of torch has an entry for each of these places in which this torch has it: the inner ones are found even where a
# model kept a reference to the outer one
_TORCH = 'torch torch.Tensor torch.nn.functional torch._C._nn'
# what entries share, with the place of their names as its name; and their names
_TABLE: dict[Fp32Op, str] = {
    Fp32Op(_TORCH, _LOSS, FLOAT32): """
        binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy cross_entropy_loss ctc_loss
        gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss multilabel_soft_margin_loss nll_loss nll_loss_nd poisson_nll_loss smooth_l1_loss
        soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss""",
    Fp32Op(_TORCH, _LOSS, FLOAT32, warning=BCE_WARNING): 'binary_cross_entropy',
    # np.asarray(tensor) ends there, too
    Fp32Op(_TORCH, 'NumPy has no bfloat16, and computes in float16 where it is given float16', FLOAT32): 'numpy',
    Fp32Op(_TORCH, 'divides by norms, inverts or exponentiates a weight'): 'nn.utils.parametrize.ParametrizationList',
    # all but products of matrices, which 16-bit numbers are for, a view, and sums whose kernels add in float32 already.
    # Most have no 16-bit kernel; matrix_exp on a CPU has one that returns garbage; others divide by what 16-bit numbers
    # cancel to. The names below are other ways to the same algorithms
    Fp32Op(_TORCH, 'has no 16-bit kernel on some device, or one whose results are far off', MODEL): f"""
        {_functions_of(torch.linalg, but='matmul multi_dot diagonal vector_norm')}
        {_functions_of(torch.fft, but='fftshift ifftshift fftfreq rfftfreq')} stft istft cdist complex histogram
        histogramdd nanquantile pdist polar quantile view_as_complex avg_pool3d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa cholesky cholesky_inverse cholesky_solve det frobenius_norm geqrf inverse lobpcg logdet
        lu lu_solve lu_unpack matrix_exp matrix_power norm_except_dim nuclear_norm orgqr ormqr pca_lowrank pinverse qr
        slogdet svd svd_lowrank triangular_solve _weight_norm""",
    Fp32Op(_TORCH, 'its eps is 0 in float16, and squares overflow', MODEL): 'normalize cosine_similarity',
    Fp32Op(_TORCH, 'divides by the norm of a weight', MODEL): 'nn.utils.spectral_norm.SpectralNorm.compute_weight',
    Fp32Op(_TORCH, 'takes coordinates, which are off by pixels in 16-bit', MODEL): 'grid_sample grid_sampler',
    Fp32Op(_TORCH, 'squares overflow float16 from 256 on', MODEL): 'local_response_norm',
    # Read from the sources of mmcv 2.1.0 (CUDA) and tried with its compiled ops (CPU). No kernel there takes bfloat16.
    Fp32Op('mmcv.ops', 'its kernels read and write float32'): """
        chamfer_distance.ChamferDistanceFunction diff_iou_rotated.SortVertices iou3d.boxes_overlap_bev iou3d.nms3d
        furthest_point_sample.FurthestPointSampling furthest_point_sample.FurthestPointSamplingWithDist
        iou3d.nms3d_normal knn.KNN nms.NMSop nms.SoftNMSop nms.nms_match pixel_group.pixel_group
        points_in_polygons.points_in_polygons scatter_points._DynamicScatter filtered_lrelu.filtered_lrelu
        psa_mask.PSAMaskFunction voxelize._Voxelization""",
    Fp32Op('mmcv.ops', 'areas of boxes overflow float16 (300 x 300 is too large), and round in bfloat16'): """
        bbox.bbox_overlaps box_iou_quadri.box_iou_quadri box_iou_rotated.box_iou_rotated convex_iou.convex_giou
        convex_iou.convex_iou diff_iou_rotated.diff_iou_rotated_2d diff_iou_rotated.diff_iou_rotated_3d
        iou3d.boxes_iou3d min_area_polygons.min_area_polygons nms.batched_nms nms.nms nms.nms_quadri nms.nms_rotated
        nms.soft_nms points_in_boxes.points_in_boxes_all points_in_boxes.points_in_boxes_part""",
    Fp32Op('mmcv.ops', 'samples a map at coordinates, which float16 puts off by a quarter pixel from 256 on'): """
        bezier_align.BezierAlignFunction border_align.BorderAlignFunction deform_conv.DeformConv2dFunction
        deform_roi_pool.DeformRoIPoolFunction modulated_deform_conv.ModulatedDeformConv2dFunction
        multi_scale_deform_attn.MultiScaleDeformableAttnFunction roi_align.RoIAlignFunction roi_pool.RoIPoolFunction
        multi_scale_deform_attn.multi_scale_deformable_attn_pytorch point_sample.bilinear_grid_sample
        point_sample.point_sample prroi_pool.PrRoIPoolFunction riroi_align_rotated.RiRoIAlignRotatedFunction
        roi_align_rotated.RoIAlignRotatedFunction roiaware_pool3d.RoIAwarePool3dFunction
        roipoint_pool3d.RoIPointPool3dFunction rotated_feature_align.RotatedFeatureAlignFunction""",
    Fp32Op('mmcv.ops.focal_loss', 'its float16 kernel takes the logarithm of 0 at saturated scores', FLOAT32): """
        SigmoidFocalLossFunction SoftmaxFocalLossFunction""",
    Fp32Op('mmcv.ops', 'no bfloat16 kernel', types=_BF16): """
        active_rotated_filter.ActiveRotatedFilterFunction assign_score_withk.AssignScoreWithK ball_query.BallQuery
        carafe.CARAFEFunction carafe.CARAFENaiveFunction correlation.CorrelationFunction gather_points.GatherPoints
        group_points.GroupingOperation masked_conv.MaskedConv2dFunction sparse_functional.SparseConvFunction
        sparse_functional.SparseInverseConvFunction sparse_functional.SparseMaxPoolFunction tin_shift.TINShiftFunction
        sparse_functional.SubMConvFunction sync_bn.SyncBatchNormFunction three_interpolate.ThreeInterpolate
        three_nn.ThreeNN bias_act.bias_act upfirdn2d.upfirdn2d fused_bias_leakyrelu.FusedBiasLeakyReLUFunction
        fused_bias_leakyrelu.FusedBiasLeakyReLUFunctionBackward""",
    Fp32Op('mmdet.models.roi_heads.roi_extractors', 'its boxes get the type of the maps', types=_BF16): """
        SingleRoIExtractor GenericRoIExtractor""",
    Fp32Op('mmdet.structures.bbox', 'areas of boxes overflow float16 and round in bfloat16'): 'bbox_overlaps',
}


#: The registry as it is delivered, by name.
FP32_OPS: dict[str, Fp32Op] = {
    name: dataclasses.replace(group, name=name)
    for group, names in _TABLE.items()
    for name in (f'{place}.{name}' for name in names.split() for place in group.name.split())
    if group.name != _TORCH or lookup.find(name) is not None
}
#: Ops that write numbers into 16-bit tensors, which refuse what they cannot hold, or make infinities of it: finite numbers
#: beyond the range become the largest of the type.
RANGE_OPS = """
    pad clamp clamp_ clamp_max clamp_min fill fill_ full_like index_fill index_fill_ masked_fill masked_fill_ new_full
    scatter scatter_ where"""

#: Methods of modules that run in FP32 by their name. OpenMMLab's heads turn network outputs into losses and predictions
#: there: boxes, anchors, sums and scores, which mmdetection 2 kept in FP32 with ``force_fp32``.
FP32_METHODS: tuple[str, ...] = ('loss_by_feat', 'loss_and_target', 'predict_by_feat')
METHOD_REASON = 'turns network outputs into losses or predictions'
