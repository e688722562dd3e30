"""Which ops autocast casts at O1 and O4 on every device: what its list for GPUs has and its list for CPUs lacks.

The list is torch's own for CUDA, by the names of the dispatcher, less what only a GPU has. Where a device's list has an op
already, torch's entry stands: :mod:`amp_wrapper.casting.kernels` takes from here what is missing. Names that a version of
torch does not know are passed over.
"""

from __future__ import annotations

#: What the floating arguments of an op are cast to: the type of autocast, float32, and the widest type among them. What torch
#: computes in place from one 16-bit tensor, it computes in float32 and rounds.
HALF, FLOAT32, PROMOTE = 'half', 'float32', 'promote'

_RECURRENT = 'lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data'
_UPSAMPLING = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""
# by rule and reason
_TABLE: dict[tuple[str, str], str] = {
    (HALF, 'a product of matrices or a convolution, or made of them'): f"""
        addmv addr mv chain_matmul linalg_multi_dot einsum convolution _convolution _convolution.deprecated lstm_cell
        gru_cell rnn_tanh_cell rnn_relu_cell {_RECURRENT}""",
    (FLOAT32, 'grows past the largest float16, or loses digits near a pole'): """
        acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan pow.Scalar pow.Tensor_Scalar
        pow.Tensor_Tensor softplus ldexp.Tensor mvlgamma""",
    (FLOAT32, 'a sum or product of many terms'): """
        cumprod cumsum prod prod.dim_int sum sum.dim_IntList logsumexp softmax.int log_softmax.int""",
    (FLOAT32, 'sums squares or powers'): """
        layer_norm native_layer_norm group_norm rms_norm renorm norm.Scalar norm.ScalarOpt_dim frobenius_norm.dim
        nuclear_norm nuclear_norm.dim linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord""",
    (FLOAT32, 'a distance'): 'cdist cosine_similarity dist pdist',
    (FLOAT32, 'a loss'): """
        poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
        huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss binary_cross_entropy_with_logits""",
    # .vec is what functions of torch call; torch.compile writes it without the other
    (FLOAT32, 'weights of neighbours lose digits'): ' '.join(f'{op} {op}.vec' for op in _UPSAMPLING.split()),
    (PROMOTE, 'refuses arguments of mixed types'): """
        addcdiv addcmul atan2 bilinear cross linalg_cross dot vdot index_put tensordot scatter_add index_add index_copy
        index_reduce lerp.Scalar lerp.Tensor masked_scatter put scatter.src scatter_reduce.two""",
}
#: The rule of each op, by its name and overload in the dispatcher, such as 'softmax.int' or 'exp'.
OP_RULES = {op: rule for (rule, _), ops in _TABLE.items() for op in ops.split()}
#: Those of them that a GPU does with an op that its own list has.
CPU_ONLY = frozenset(_RECURRENT.split())
