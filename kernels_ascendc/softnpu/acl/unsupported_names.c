// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The rest of what torch_npu 2.13 links, by name. C and no ACL header, so that a name can stand without its parameters,
// which nothing here reads (the calling conventions of x86-64 and AArch64 allow that). A call that would have to do
// something fails and says its name; profiling, dumps and the parts of an operator's description that only feed a
// failing call do nothing.
#define EXPORT __attribute__((visibility("default")))

long softnpu_not_supported(const char* name);

#define NOT_SUPPORTED(name) \
  EXPORT long name(void) { return softnpu_not_supported(#name); }
#define NOTHING_TO_DO(name) \
  EXPORT long name(void) { return 0; }
#define OPAQUE(name) \
  EXPORT void* name(void) { return &opaque_object; }

static char opaque_object;  // what descriptions that nobody reads point to

NOTHING_TO_DO(MsprofGetHashId)
NOTHING_TO_DO(MsprofRegisterCallback)
NOTHING_TO_DO(MsprofReportAdditionalInfo)
NOTHING_TO_DO(MsprofReportApi)
NOTHING_TO_DO(MsprofReportCompactInfo)
NOTHING_TO_DO(MsprofSysCycleTime)
NOTHING_TO_DO(aclmdlFinalizeDump)
NOTHING_TO_DO(aclmdlInitDump)
NOTHING_TO_DO(aclmdlSetDump)

OPAQUE(aclCreateDataBuffer)
OPAQUE(aclCreateTensorDesc)
OPAQUE(aclopCreateAttr)
NOTHING_TO_DO(aclDestroyDataBuffer)
NOTHING_TO_DO(aclDestroyTensorDesc)
NOTHING_TO_DO(aclopDestroyAttr)
NOTHING_TO_DO(aclSetTensorDescName)
NOTHING_TO_DO(aclSetTensorFormat)
NOTHING_TO_DO(aclSetTensorPlaceMent)
NOTHING_TO_DO(aclSetTensorShape)
NOTHING_TO_DO(aclopSetAttrBool)
NOTHING_TO_DO(aclopSetAttrDataType)
NOTHING_TO_DO(aclopSetAttrFloat)
NOTHING_TO_DO(aclopSetAttrInt)
NOTHING_TO_DO(aclopSetAttrListBool)
NOTHING_TO_DO(aclopSetAttrListFloat)
NOTHING_TO_DO(aclopSetAttrListInt)
NOTHING_TO_DO(aclopSetAttrListListInt)
NOTHING_TO_DO(aclopSetAttrString)

NOT_SUPPORTED(aclGetTensorDescDimV2)
NOT_SUPPORTED(aclGetTensorDescFormat)
NOT_SUPPORTED(aclGetTensorDescNumDims)
NOT_SUPPORTED(aclGetTensorDescType)
NOT_SUPPORTED(aclrtBinaryGetFunction)
NOT_SUPPORTED(aclrtBinaryLoadFromData)
NOT_SUPPORTED(aclrtDeviceGetBareTgid)
NOT_SUPPORTED(aclrtFreePhysical)
NOT_SUPPORTED(aclrtGetFunctionAddr)
NOT_SUPPORTED(aclrtMallocPhysical)
NOT_SUPPORTED(aclrtMapMem)
NOT_SUPPORTED(aclrtMemExportToShareableHandle)
NOT_SUPPORTED(aclrtMemImportFromShareableHandle)
NOT_SUPPORTED(aclrtMemSetPidToShareableHandle)
NOT_SUPPORTED(aclrtReleaseMemAddress)
NOT_SUPPORTED(aclrtReserveMemAddress)
NOT_SUPPORTED(aclrtUnmapMem)
NOT_SUPPORTED(rtDevBinaryRegister)
NOT_SUPPORTED(rtFunctionRegister)
NOT_SUPPORTED(rtGetC2cCtrlAddr)
NOT_SUPPORTED(rtKernelLaunch)
