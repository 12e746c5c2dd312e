// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// libatb.so: libop_plugin_atb links these C++ functions of the Ascend Transformer Boost library. Every one fails
// (status 1), so an atb operator without a registered body raises. Assembler labels give the mangled names on any ELF
// processor.
#define FAILS(alias, mangled)                                              \
  __attribute__((visibility("default"))) int alias(void) __asm__(mangled); \
  int alias(void) { return 1; }

FAILS(create_context, "_ZN3atb13CreateContextEPPNS_7ContextE")
FAILS(destroy_context, "_ZN3atb14DestroyContextEPNS_7ContextE")
FAILS(create_linear, "_ZN3atb15CreateOperationINS_5infer11LinearParamEEEiRKT_PPNS_9OperationE")
FAILS(create_elewise, "_ZN3atb15CreateOperationINS_5infer12ElewiseParamEEEiRKT_PPNS_9OperationE")
FAILS(create_rms_norm, "_ZN3atb15CreateOperationINS_5infer12RmsNormParamEEEiRKT_PPNS_9OperationE")
FAILS(create_group_topk, "_ZN3atb15CreateOperationINS_5infer14GroupTopkParamEEEiRKT_PPNS_9OperationE")
FAILS(create_self_attention, "_ZN3atb15CreateOperationINS_5infer18SelfAttentionParamEEEiRKT_PPNS_9OperationE")
FAILS(create_paged_attention, "_ZN3atb15CreateOperationINS_5infer19PagedAttentionParamEEEiRKT_PPNS_9OperationE")
FAILS(create_reshape_and_cache, "_ZN3atb15CreateOperationINS_5infer20ReshapeAndCacheParamEEEiRKT_PPNS_9OperationE")
FAILS(create_rope, "_ZN3atb15CreateOperationINS_5infer9RopeParamEEEiRKT_PPNS_9OperationE")
FAILS(destroy_operation, "_ZN3atb16DestroyOperationEPNS_9OperationE")
FAILS(tensor_size, "_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE")
