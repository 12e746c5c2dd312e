// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// libacl_op_compiler.so: torch_npu sets options here and reads them back. Nothing is compiled.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#define SOFTNPU_API extern "C" __attribute__((visibility("default")))

namespace {
std::mutex g_mutex;
std::map<int, std::string> g_compile_options;
std::map<int, int64_t> g_system_parameters;
}  // namespace

SOFTNPU_API aclError aclSetCompileopt(aclCompileOpt option, const char* value) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_compile_options[option] = value;
  return ACL_SUCCESS;
}
SOFTNPU_API size_t aclGetCompileoptSize(aclCompileOpt option) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_compile_options[option].size() + 1;
}
SOFTNPU_API aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t room) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const std::string& text = g_compile_options[option];
  if (room < text.size() + 1) return ACL_ERROR_INVALID_PARAM;
  std::memcpy(value, text.c_str(), text.size() + 1);
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_system_parameters[option] = value;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  std::lock_guard<std::mutex> lock(g_mutex);
  *value = g_system_parameters[option];
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}
SOFTNPU_API aclError aclopSetCompileFlag(aclOpCompileFlag) { return ACL_SUCCESS; }
