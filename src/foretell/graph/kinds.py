"""The closed set of operation kinds, and which framework operation is of which kind.

An operation's name is the dispatcher's: ``aten.convolution.default``. Its *base* is the middle part without the
underscore of the in-place form: ``aten.add_.Tensor`` → ``add``.
"""

from __future__ import annotations

from functools import cache

_MEMBERS: dict[str, str] = {
    "matmul": "mm addmm linear linear_backward mv addmv addr dot vdot _scaled_mm _int_mm",
    "batched_matmul": "bmm baddbmm addbmm einsum matmul",
    "grouped_matmul": "grouped_mm grouped_mm_weight _grouped_mm _scaled_grouped_mm",
    "convolution": "convolution convolution_backward",
    "attention": "sdpa sdpa_backward",
    "normalization": """
        native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training batch_norm_with_update
        cudnn_batch_norm native_batch_norm_backward batch_norm_backward native_layer_norm native_layer_norm_backward
        native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward rms_norm""",
    "softmax": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax logsumexp",
    "reduction": """
        sum mean amax amin max min prod var std var_mean std_mean norm linalg_vector_norm any all argmax argmin
        count_nonzero nansum median mode aminmax _foreach_norm _foreach_max trace equal""",
    "pooling": """
        max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward avg_pool1d avg_pool3d
        avg_pool3d_backward max_pool3d_with_indices max_pool3d_with_indices_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool2d
        adaptive_max_pool2d_backward adaptive_max_pool3d fractional_max_pool2d max_unpool2d""",
    "resample": """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d upsample_bilinear2d
        upsample_bicubic2d upsample_linear1d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
        upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
        upsample_linear1d_backward upsample_nearest1d_backward upsample_trilinear3d_backward
        _upsample_nearest_exact2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
        grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward im2col col2im
        roi_align""",
    "embedding": "embedding embedding_dense_backward _embedding_bag embedding_renorm",
    "indexing": """
        index index_select index_put _unsafe_index _unsafe_index_put index_add index_copy index_fill gather
        scatter scatter_add scatter_reduce take masked_select masked_scatter select_scatter slice_scatter
        gather_backward index_backward one_hot _unsafe_masked_index _unsafe_masked_index_put_accumulate
        take_along_dim nonzero repeat_interleave bincount histc searchsorted bucketize""",
    "sort": "sort topk argsort kthvalue unique _unique2 unique_consecutive unique_dim msort",
    "scan": "cumsum cumprod cummax cummin logcumsumexp cumsum_backward",
    "copy": """
        copy clone _to_copy contiguous cat stack constant_pad_nd pad reflection_pad1d reflection_pad2d
        reflection_pad2d_backward replication_pad1d replication_pad2d replication_pad2d_backward
        reflection_pad1d_backward replication_pad3d roll flip repeat tile slice_backward select_backward
        unfold_backward diagonal_backward as_strided_scatter _foreach_copy split_with_sizes_copy
        pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle tril triu rot90""",
    "random": """
        bernoulli native_dropout rand randn randint rand_like randn_like randint_like randperm normal uniform
        multinomial exponential random""",
    "fill": """
        zeros ones full empty_filled zeros_like ones_like full_like fill zero arange linspace eye scalar_tensor
        new_zeros new_ones new_full _foreach_zero tril_indices triu_indices""",
    "recurrent": """
        lstm gru _thnn_fused_lstm_cell _thnn_fused_gru_cell _cudnn_rnn mkldnn_rnn_layer mkldnn_rnn_layer_backward
        rnn_tanh rnn_relu""",
    "fft": "_fft_r2c _fft_c2r _fft_c2c stft istft",
    "linear_algebra": """
        linalg_inv_ex linalg_cholesky_ex linalg_qr linalg_svd _linalg_svd _linalg_eigh linalg_lu_factor_ex
        triangular_solve linalg_solve_ex _linalg_solve_ex _linalg_det _linalg_slogdet cholesky_solve
        linalg_solve_triangular linalg_lstsq cdist _cdist_forward _cdist_backward""",
    "loss": """
        nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward
        binary_cross_entropy binary_cross_entropy_with_logits smooth_l1_loss huber_loss _ctc_loss
        cross_entropy cross_entropy_backward l1_loss binary_cross_entropy_backward smooth_l1_loss_backward
        huber_loss_backward""",
    "optimizer": """
        _fused_adam _fused_adamw _fused_sgd _fused_adagrad adam_step adamw_step sgd_step""",
    "scalar_read": "_local_scalar_dense item",
    "view": """
        view _unsafe_view reshape _reshape_alias expand permute transpose t squeeze unsqueeze slice select split
        split_with_sizes chunk unbind detach alias as_strided diagonal unfold view_as_real view_as_complex real imag
        movedim lift lift_fresh resize empty empty_like new_empty empty_strided new_empty_strided sym_size
        set narrow empty_permuted unsafe_split unsafe_split_with_sizes unsafe_chunk record_stream
        _has_same_storage_numel is_same_size stride numel size positive _conj _neg_view numpy_T mT flatten unflatten""",
    "pointwise": """
        add sub rsub mul div true_divide floor_divide remainder fmod pow exp exp2 expm1 log log2 log10 log1p sqrt rsqrt
        reciprocal neg abs sign sgn floor ceil round trunc frac clamp clamp_min clamp_max maximum minimum fmax fmin
        sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erfinv sigmoid logit relu relu6
        threshold threshold_backward hardtanh hardtanh_backward hardsigmoid hardsigmoid_backward hardswish
        hardswish_backward leaky_relu leaky_relu_backward elu elu_backward celu selu gelu gelu_backward silu
        silu_backward mish mish_backward softplus softplus_backward softshrink hardshrink softsign log_sigmoid_forward
        log_sigmoid_backward sigmoid_backward tanh_backward prelu _prelu_kernel _prelu_kernel_backward glu
        glu_backward native_dropout_backward where masked_fill eq ne lt le gt ge logical_and logical_or logical_not
        logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__
        __xor__ __lshift__ __rshift__ isnan isinf isfinite isposinf isneginf addcmul addcdiv lerp square polar complex
        angle conj conj_physical nan_to_num heaviside hypot copysign sinc xlogy special_xlog1py lgamma digamma
        i0 special_expit _foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_addcmul _foreach_addcdiv
        _foreach_lerp _foreach_sqrt _foreach_pow _foreach_neg _foreach_reciprocal _foreach_maximum _foreach_minimum
        _foreach_clamp_min _foreach_clamp_max _foreach_sign _foreach_abs _foreach_exp _foreach_log
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale _fused_dropout rotary swiglu geglu
        quantize_per_tensor dequantize fake_quantize_per_tensor_affine add_scalar""",
    "communication": "all_reduce all_gather reduce_scatter all_to_all broadcast send recv",
    "other": "",
}

KINDS: tuple[str, ...] = tuple(_MEMBERS)

_KIND_OF = {base: kind for kind, members in _MEMBERS.items() for base in members.split()}


@cache
def base_name(name: str) -> str:
    """``aten.add_.Tensor`` → ``add``; a name without namespace is its own base."""
    parts = name.split(".")
    base = parts[1] if len(parts) > 1 else parts[0]
    return base[:-1] if base.endswith("_") and not base.endswith("__") else base


@cache
def kind_of(name: str) -> str:
    """The kind of an operation by its dispatcher name; ``other`` where none is known."""
    return _KIND_OF.get(base_name(name), "other")
