// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Device operators. There is no operator compiler: a call returns "not supported" and puts the operator's name into
// aclGetRecentErrMsg; torch_npu turns that into an exception. unsupported_names.c has the calls that need no parameter.
#include <acl/acl_op_compiler.h>

#include "runtime.h"

SOFTNPU_API aclError aclopCompileAndExecute(const char* op, int, const aclTensorDesc* const[],
                                            const aclDataBuffer* const[], int, const aclTensorDesc* const[],
                                            aclDataBuffer* const[], const aclopAttr*, aclopEngineType, aclopCompileType,
                                            const char*, aclrtStream) {
  return softnpu::fail(ACL_ERROR_FEATURE_UNSUPPORTED,
                       std::string("the device operator ") + op + " has no body on the software NPU");
}

extern "C" long softnpu_not_supported(const char* name) {
  return softnpu::fail(ACL_ERROR_FEATURE_UNSUPPORTED, std::string(name) + " is not supported by the software NPU");
}
