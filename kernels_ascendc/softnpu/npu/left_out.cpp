// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Problem: an operator of vllm-ascend 0.23.0 that no family here has would be an AttributeError of torch.ops, which
// says nothing about why. Way: every other schema of its csrc/torch_binding.cpp (the list for A2 and later) is defined
// here and raises by name. Who gives one of them a body moves its line to the family. The tests compare the schemas
// with those in the wheel.
#include <torch/library.h>

namespace softnpu {
namespace {

void left_out(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, c10::toString(op.operator_name()),
      " of vllm-ascend 0.23.0 is left out of the software NPU: it is not part of the unquantised path of DeepSeek-V4. "
      "Choose a configuration without it, or give it a body (kernels_ascendc/softnpu/npu).");
}

constexpr const char* kLeftOut[] = {
    "npu_gemma_rms_norm(Tensor x, Tensor gamma, float epsilon=1e-6)-> (Tensor y ,Tensor rstd)",
    "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None,"
    " float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, Tensor? "
    "num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor",
    "get_masked_input_and_mask(Tensor input, int org_vocab_start_index, int org_vocab_end_index, int "
    "num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index) -> (Tensor masked_input, Tensor"
    " mask)",
    "bgmv_shrink(Tensor! x, Tensor! weight, Tensor! indices, Tensor! y, float scale) -> ()",
    "bgmv_expand(Tensor! x, Tensor! weight, Tensor! indices, Tensor! y, int slice_offset, int slice_size) -> Tensor",
    "sgmv_shrink(Tensor! x, Tensor! weight, Tensor! lora_indices, Tensor! seq_len, Tensor! y, float scale) -> ()",
    "sgmv_expand(Tensor! x, Tensor! weight, Tensor! lora_indices, Tensor! seq_len, Tensor! y, int slice_offset, int"
    " slice_size) -> Tensor",
    "mla_preprocess(Tensor hiddenState, Tensor wdqkv, Tensor? descale0, Tensor gamma1, Tensor? beta1, Tensor wuq, "
    "Tensor? descale1, Tensor gamma2, Tensor cos, Tensor sin, Tensor wuk, Tensor kv_cache, Tensor kv_cache_rope, "
    "Tensor slotmapping, Tensor? quant_scale0, Tensor? quant_offset0, Tensor? bias0, Tensor? quant_scale1, Tensor? "
    "quant_offset1, Tensor? bias1, Tensor? ctkv_scale, Tensor? q_nope_scale, str? cache_mode, str? quant_mode, "
    "bool? enable_inner_out, Tensor! q_out0, Tensor! kv_cache_out0, Tensor! q_out1, Tensor! kv_cache_out1, Tensor! "
    "inner_out) -> (Tensor q_out0, Tensor kv_cache_out0, Tensor q_out1, Tensor kv_cache_out1, Tensor inner_out)",
    "batch_matmul_transpose(Tensor tensor_a, Tensor tensor_b, Tensor tensor_c, str? format_mode=None, str? "
    "quant_mode=None) -> ()",
    "swap_blocks(Tensor! x, Tensor! y, Tensor z) -> ()",
    "swap_blocks_batch(Tensor x, Tensor y, Tensor z, int direction) -> ()",
    "device_print(str msg) -> ()",
    "device_print_tensor(Tensor tensor) -> ()",
    "get_npu_storage_shape(Tensor tensor) -> int[]",
    "grouped_matmul_swiglu_quant(Tensor x, Tensor weight, Tensor weight_scale, Tensor x_scale, Tensor group_list, "
    "*, Tensor? bias=None, Tensor? offset=None, float swiglu_limit=0.0) -> (Tensor output, Tensor output_scale, "
    "Tensor output_offset)",
    "grouped_matmul_swiglu_quant_weight_nz(Tensor x, Tensor weight, Tensor weight_scale, Tensor x_scale, Tensor "
    "group_list, *, Tensor? bias=None, Tensor? offset=None, float swiglu_limit=0.0) -> (Tensor output, Tensor "
    "output_scale, Tensor output_offset)",
    "dispatch_gmm_combine_decode(Tensor x, Tensor expert_ids, Tensor[] gmm1_permuted_weight, Tensor[] "
    "gmm1_permuted_weight_scale, Tensor[] gmm2_weight, Tensor[] gmm2_weight_scale, Tensor expert_scales, Tensor? "
    "expert_smooth_scales=None, Tensor? x_active_mask=None, str group_ep='', int ep_rank_size=0, int ep_rank_id=0, "
    "int moe_expert_num=0, int shared_expert_num=1, int shared_expert_rank_num=0, int quant_mode=0, int "
    "global_bs=0) -> (Tensor output, Tensor expert_token_nums)",
    "grouped_matmul_swiglu_quant_weight_nz_tensor_list(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor "
    "x_scale, Tensor group_list, *, Tensor? bias=None, Tensor? offset=None, float swiglu_limit=0.0) -> (Tensor "
    "output, Tensor output_scale, Tensor output_offset)",
    "grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, Tensor "
    "group_list, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None, int? "
    "dequant_mode=0, int? dequant_dtype=0, int? quant_mode=0, int? quant_dtype=0, bool transpose_weight=False, int "
    "group_list_type=0, int[2] tuning_config=[],float swiglu_limit=0.0) -> (Tensor output, Tensor output_scale)",
    "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', str layout_key='BSND',"
    " int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, int "
    "next_tokens=9223372036854775807, bool return_value=False) -> (Tensor sparse_indices, Tensor sparse_values)",
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, "
    "*, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND', str "
    "layout_kv='BSND', int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, "
    "int attention_mode=2, bool return_softmax_lse=False) -> (Tensor attention_out, Tensor softmax_max, Tensor "
    "softmax_sum)",
    "npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float "
    "scale_value, *, int key_quant_mode=1, int value_quant_mode=1, Tensor? key_dequant_scale=None, Tensor? "
    "value_dequant_scale=None, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? "
    "actual_seq_lengths_kv=None, int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', int "
    "sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=2, "
    "int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64, bool return_softmax_lse=False) -> "
    "(Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)",
    "dispatch_ffn_combine(Tensor x, Tensor[] weight1, Tensor[] weight2, Tensor expert_idx, Tensor[] scale1, "
    "Tensor[] scale2, Tensor[] bias1, Tensor[] bias2, Tensor probs, str group, int max_output_size, Tensor! out, "
    "Tensor! expert_token_nums, Tensor? x_active_mask=None, float swiglu_limit=1000000.0) -> (Tensor out, Tensor "
    "expert_token_nums)",
    "matmul_allreduce_add_rmsnorm(Tensor x1, Tensor x2, Tensor residual, Tensor gamma, str groupTp, int tpRankSize,"
    " int tpRankId, float epsilon, bool isTransB, bool isGatherAddOut) -> (Tensor output, Tensor add_out)",
    "npu_hamming_dist_top_k(Tensor q, Tensor k_comp, Tensor k_comp_rope, Tensor k, Tensor seq_len, Tensor? "
    "chunk_size=None, int? max_seq_len=None, int? sink=None, int? recent=None, int? support_offload=None, Tensor? "
    "key_block_table=None, Tensor? mask=None, Tensor? indices=None) -> Tensor",
    "npu_reshape_and_cache_bnsd(Tensor q, Tensor k_comp, Tensor slot_mapping, Tensor seq_len, Tensor k_out) -> "
    "Tensor",
    "npu_sign_bits_pack(Tensor input, int size) -> Tensor",
    "transpose_kv_cache_by_block(Tensor[] kCache, Tensor[] vCache, Tensor blockIDs, int blockSize, int headNum, int"
    " headDim, int splitNum, int layerNum) -> ()",
    "npu_copy_and_expand_eagle_inputs(Tensor target_token_ids, Tensor target_positions, Tensor next_token_ids, "
    "Tensor query_start_loc, Tensor query_end_loc, int padding_token_id, int parallel_drafting_token_id, int "
    "num_padding_slots_per_request, bool shift_input_ids, int total_draft_tokens) -> (Tensor out_input_ids, Tensor "
    "out_positions, Tensor out_is_rejected_token_mask, Tensor out_is_masked_token_mask, Tensor "
    "out_new_token_indices, Tensor out_hidden_state_mapping)",
    "npu_causal_conv1d_custom(Tensor output, Tensor x, Tensor weight, Tensor conv_state, Tensor? bias_opt, Tensor? "
    "query_start_loc_opt, Tensor? cache_indices_opt, Tensor? initial_state_mode_opt, Tensor? "
    "num_accepted_tokens_opt, int activation_mode, int pad_slot_id, int run_mode) -> (Tensor output)",
    "moe_grouped_matmul(Tensor x,Tensor weight,Tensor group_list,int split_item,int group_type,int "
    "group_list_type)-> Tensor[]",
    "npu_hc_pre(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, int hc_sinkhorn_iters, float "
    "norm_eps, float hc_eps) -> (Tensor out0, Tensor out1, Tensor out2)",
    "npu_hc_pre_inv_rms(Tensor x, float epsilon=1e-20) -> (Tensor out)",
    "npu_hc_pre_sinkhorn(Tensor mixes, Tensor rsqrt, Tensor hc_scale, Tensor hc_base, Tensor x, int hc_mult, int "
    "hc_sinkhorn_iters, float hc_eps) -> (Tensor out0, Tensor out1, Tensor out2)",
    "npu_rms_norm_dynamic_quant(Tensor x, Tensor gamma, Tensor? smooth_scale=None, Tensor? beta=None, float "
    "epsilon=1e-6) -> (Tensor y_out, Tensor scale_out)",
    "indexer_compress_epilog(Tensor(a!) indexer_compress_cache, Tensor(b!) indexer_compress_cache_scale, Tensor x, "
    "Tensor slot_mapping, int quant_mode=1, bool round_scale=True) -> ()",
    "kv_compress_epilog(Tensor(a!) kv_compress_cache, Tensor x, Tensor slot_mapping, int quant_group_size, int "
    "quant_mode, bool round_scale_flag, int layout) -> ()",
    "npu_kv_quant_sparse_attn_sharedkv(Tensor q, int kv_quant_mode, Tensor? ori_kv=None, Tensor? cmp_kv=None, "
    "Tensor? ori_sparse_indices=None, Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, Tensor? "
    "cmp_block_table=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? "
    "cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_kv=None, Tensor? sinks=None, Tensor? "
    "metadata=None, int tile_size=0, int rope_head_dim=0, float softmax_scale=0.0, int cmp_ratio=0, int "
    "ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=127, int ori_win_right=0, str layout_q='BSND', str "
    "layout_kv='PA_ND', bool return_softmax_lse=False) -> (Tensor out, Tensor softmax_lse)",
    "npu_kv_quant_sparse_attn_sharedkv_metadata(int num_heads_q, int num_heads_kv, int head_dim, int kv_quant_mode,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, Tensor? "
    "seqused_q=None, Tensor? seqused_kv=None, int batch_size=0, int max_seqlen_q=0, int max_seqlen_kv=0, int "
    "ori_topk=0, int cmp_topk=0, int tile_size=0, int rope_head_dim=0, int cmp_ratio=-1, int ori_mask_mode=4, int "
    "cmp_mask_mode=3, int ori_win_left=127, int ori_win_right=0, str layout_q='BSND', str layout_kv='PA_ND', bool "
    "has_ori_kv=True, bool has_cmp_kv=True, str device='npu') -> Tensor",
    "npu_swiglu_group_quant(Tensor x, Tensor? topk_weight, Tensor? group_index, ScalarType dst_type=39, int "
    "quant_mode=1, int group_size=128, bool round_scale=False, bool ue8m0_scale=False, bool output_origin=False, "
    "int group_list_type=0, float clamp_value=0.0) -> (Tensor y, Tensor scale, Tensor y_origin)",
    "npu_load_index_kv_cache(Tensor kv_cache, Tensor slot_mapping) -> (Tensor out, Tensor out_scale)",
    "indexer_compress_epilog_v2(Tensor(a!) indexer_compress_cache, Tensor x, Tensor slot_mapping, int layout=2) -> "
    "()",
    "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? "
    "bias=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, bool "
    "activate_left=True, int quant_mode=0, int swiglu_mode=0, float clamp_limit=0.0, float glu_alpha=1.0, float "
    "glu_bias=0.0) -> (Tensor y, Tensor scale)",
    "npu_lightning_indexer_quant(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, Tensor "
    "key_dequant_scale, *, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? "
    "block_table=None, int query_quant_mode=0, int key_quant_mode=0, str layout_query='BSND', str "
    "layout_key='BSND', int sparse_count=2048, int sparse_mode=3) -> Tensor",
    "npu_ngram_spec_decode(Tensor(a!) token_ids, Tensor num_tokens_no_spec, Tensor sampled_token_ids, Tensor "
    "discard_request_mask, int vocab_size, int min_n, int max_n, int k) -> (Tensor token_ids, Tensor "
    "next_token_ids, Tensor draft_token_ids, Tensor num_valid_draft_tokens)",
    "chunk_gated_delta_rule_fwd_h(Tensor k, Tensor w, Tensor u, Tensor? g=None, *, Tensor? gk=None, Tensor? "
    "initial_state=None, bool? output_final_state=False, int? chunk_size=None, bool? save_new_value=True, int[]? "
    "cu_seqlens=None, int[]? chunk_indices=None, bool? use_exp2=False, bool? transpose_state_layout=False) -> "
    "(Tensor h_out, Tensor v_new_out, Tensor final_state_out)",
    "chunk_fwd_o(Tensor q, Tensor k, Tensor v, Tensor h, float scale, *, Tensor? g=None, Tensor? g_gamma=None, "
    "int[]? cu_seqlens=None, int[]? chunk_indices=None, int? chunk_size=None, bool? transpose_state_layout=False) "
    "-> Tensor",
    "store_kv_block_metadata(Tensor slot_mapping_npu, Tensor group_len, Tensor group_key_idx, Tensor "
    "group_key_cache_idx, int block_size=0)-> ()",
    "store_kv_block(Tensor key_in, Tensor key_cache_in, Tensor group_len, Tensor group_key_idx,Tensor "
    "group_key_cache_idx, int block_size=0) -> ()",
    "npu_fused_gdn_gating(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias, float beta=1.0, float threshold=20.0) "
    "-> (Tensor g, Tensor beta_output)",
};

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_FRAGMENT(_C_ascend, m) {
  for (const char* schema : softnpu::kLeftOut) m.def(schema);
}
// Also for operators without a tensor, and for tensors on the meta device, where vllm-ascend registers nothing itself.
TORCH_LIBRARY_IMPL(_C_ascend, CompositeExplicitAutograd, m) {
  for (const std::string schema : softnpu::kLeftOut)
    m.impl(schema.substr(0, schema.find('(')).c_str(), torch::CppFunction::makeFromBoxedFunction<&softnpu::left_out>());
}
