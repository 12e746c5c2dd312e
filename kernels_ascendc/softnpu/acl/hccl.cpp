// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Software HCCL: ranks exchange files in /dev/shm; every call is queued on the caller's software stream.
#include "hccl/hccl.h"
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
using half = c10::Half; using bfloat16_t = c10::BFloat16;
#define API extern "C" __attribute__((visibility("default")))
extern "C" void softnpu_push(void* s, void (*f)(void*), void* a, void (*d)(void*));
static void push(aclrtStream s, std::function<void()> f) { softnpu_push(s, [](void* a) { (*(std::function<void()>*)a)(); }, new std::function<void()>(std::move(f)), [](void* a) { delete (std::function<void()>*)a; }); }
struct Comm { std::string dir, name; uint32_t n, r; std::map<uint32_t, uint64_t> out, in; };
static size_t esz(HcclDataType t) { switch (t) { case HCCL_DATA_TYPE_INT8: case HCCL_DATA_TYPE_UINT8: return 1; case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16: return 2; case HCCL_DATA_TYPE_INT64: case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64: return 8; default: return 4; } }
static void put(Comm* c, uint32_t to, uint64_t seq, const void* p, size_t n) { std::string f = c->dir + "/" + std::to_string(c->r) + "_" + std::to_string(to) + "_" + std::to_string(seq), t = f + ".t"; FILE* h = fopen(t.c_str(), "wb"); if (!h) { perror(t.c_str()); abort(); } fwrite(p, 1, n, h); fclose(h); rename(t.c_str(), f.c_str()); }
static void get(Comm* c, uint32_t from, uint64_t seq, void* p, size_t n) { std::string f = c->dir + "/" + std::to_string(from) + "_" + std::to_string(c->r) + "_" + std::to_string(seq); FILE* h; while (!(h = fopen(f.c_str(), "rb"))) usleep(50); size_t k = fread(p, 1, n, h); fclose(h); unlink(f.c_str()); if (k != n) { fprintf(stderr, "softhccl: got %zu bytes, wanted %zu\n", k, n); abort(); } }
template <class T> static void acc(void* d, const void* s, size_t n, HcclReduceOp op) { T* a = (T*)d; const T* b = (const T*)s; for (size_t i = 0; i < n; i++) a[i] = op == HCCL_REDUCE_SUM ? T(a[i] + b[i]) : op == HCCL_REDUCE_PROD ? T(a[i] * b[i]) : op == HCCL_REDUCE_MAX ? (b[i] > a[i] ? b[i] : a[i]) : (b[i] < a[i] ? b[i] : a[i]); }
static void red(void* d, const void* s, size_t n, HcclDataType t, HcclReduceOp op) { switch (t) { case HCCL_DATA_TYPE_FP32: return acc<float>(d, s, n, op); case HCCL_DATA_TYPE_FP64: return acc<double>(d, s, n, op); case HCCL_DATA_TYPE_FP16: return acc<half>(d, s, n, op); case HCCL_DATA_TYPE_BFP16: return acc<bfloat16_t>(d, s, n, op); case HCCL_DATA_TYPE_INT8: return acc<int8_t>(d, s, n, op); case HCCL_DATA_TYPE_UINT8: return acc<uint8_t>(d, s, n, op); case HCCL_DATA_TYPE_INT16: return acc<int16_t>(d, s, n, op); case HCCL_DATA_TYPE_INT32: return acc<int32_t>(d, s, n, op); case HCCL_DATA_TYPE_INT64: return acc<int64_t>(d, s, n, op); default: abort(); } }
struct Plan { std::vector<std::pair<uint32_t, uint64_t>> s, r; };  // sequence numbers are taken in issue order, on the caller's thread
static uint64_t so(Comm* c, uint32_t p) { return c->out[p]++; } static uint64_t si(Comm* c, uint32_t p) { return c->in[p]++; }
API HcclResult HcclGetRootInfo(HcclRootInfo* r) { std::random_device d; memset(r, 0, sizeof *r); snprintf(r->internal, 64, "softhccl_%08x%08x", d(), d()); return HCCL_SUCCESS; }
API HcclResult HcclCommInitRootInfo(uint32_t n, const HcclRootInfo* root, uint32_t rank, HcclComm* comm) { auto c = new Comm; c->n = n; c->r = rank; c->name = root->internal; c->dir = std::string("/dev/shm/") + root->internal; mkdir(c->dir.c_str(), 0700); *comm = c; return HCCL_SUCCESS; }
API HcclResult HcclCommInitRootInfoConfig(uint32_t n, const HcclRootInfo* root, uint32_t rank, const HcclCommConfig*, HcclComm* comm) { return HcclCommInitRootInfo(n, root, rank, comm); }
API HcclResult HcclCommDestroy(HcclComm c) { auto p = (Comm*)c; if (p->r == 0) rmdir(p->dir.c_str()); return HCCL_SUCCESS; }
API HcclResult HcclGetCommName(HcclComm c, char* n) { strcpy(n, ((Comm*)c)->name.c_str()); return HCCL_SUCCESS; }
API HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* e) { *e = HCCL_SUCCESS; return HCCL_SUCCESS; }
API HcclResult HcclGetRankSize(HcclComm c, uint32_t* n) { *n = ((Comm*)c)->n; return HCCL_SUCCESS; }
API HcclResult HcclGetRankId(HcclComm c, uint32_t* r) { *r = ((Comm*)c)->r; return HCCL_SUCCESS; }
API const char* HcclGetErrorString(HcclResult) { return "softhccl"; }
API HcclResult HcclSend(void* b, uint64_t n, HcclDataType t, uint32_t to, HcclComm cc, aclrtStream s) { auto c = (Comm*)cc; auto q = so(c, to); push(s, [=] { put(c, to, q, b, n * esz(t)); }); return HCCL_SUCCESS; }
API HcclResult HcclRecv(void* b, uint64_t n, HcclDataType t, uint32_t from, HcclComm cc, aclrtStream s) { auto c = (Comm*)cc; auto q = si(c, from); push(s, [=] { get(c, from, q, b, n * esz(t)); }); return HCCL_SUCCESS; }
static Plan all(Comm* c) { Plan p; for (uint32_t i = 0; i < c->n; i++) if (i != c->r) { p.s.push_back({i, so(c, i)}); p.r.push_back({i, si(c, i)}); } return p; }
API HcclResult HcclAllReduce(void* i, void* o, uint64_t n, HcclDataType t, HcclReduceOp op, HcclComm cc, aclrtStream s) { auto c = (Comm*)cc; auto p = all(c); push(s, [=] { size_t z = n * esz(t); std::vector<std::vector<char>> in(c->n); for (auto& x : p.s) put(c, x.first, x.second, i, z); in[c->r].assign((char*)i, (char*)i + z); for (auto& x : p.r) { in[x.first].resize(z); get(c, x.first, x.second, in[x.first].data(), z); } memcpy(o, in[0].data(), z); for (uint32_t k = 1; k < c->n; k++) red(o, in[k].data(), n, t, op); }); return HCCL_SUCCESS; }
API HcclResult HcclAllGather(void* i, void* o, uint64_t n, HcclDataType t, HcclComm cc, aclrtStream s) { auto c = (Comm*)cc; auto p = all(c); push(s, [=] { size_t z = n * esz(t); for (auto& x : p.s) put(c, x.first, x.second, i, z); memmove((char*)o + c->r * z, i, z); for (auto& x : p.r) get(c, x.first, x.second, (char*)o + x.first * z, z); }); return HCCL_SUCCESS; }
API HcclResult HcclReduceScatter(void* i, void* o, uint64_t n, HcclDataType t, HcclReduceOp op, HcclComm cc, aclrtStream s) { auto c = (Comm*)cc; auto p = all(c); push(s, [=] { size_t z = n * esz(t); for (auto& x : p.s) put(c, x.first, x.second, (char*)i + x.first * z, z); std::vector<std::vector<char>> in(c->n); in[c->r].assign((char*)i + c->r * z, (char*)i + (c->r + 1) * z); for (auto& x : p.r) { in[x.first].resize(z); get(c, x.first, x.second, in[x.first].data(), z); } memcpy(o, in[0].data(), z); for (uint32_t k = 1; k < c->n; k++) red(o, in[k].data(), n, t, op); }); return HCCL_SUCCESS; }
API HcclResult HcclBroadcast(void* b, uint64_t n, HcclDataType t, uint32_t root, HcclComm cc, aclrtStream s) { auto c = (Comm*)cc; size_t z = n * esz(t); if (c->r == root) { std::vector<std::pair<uint32_t, uint64_t>> v; for (uint32_t i = 0; i < c->n; i++) if (i != root) v.push_back({i, so(c, i)}); push(s, [=] { for (auto& x : v) put(c, x.first, x.second, b, z); }); } else { auto q = si(c, root); push(s, [=] { get(c, root, q, b, z); }); } return HCCL_SUCCESS; }
API HcclResult HcclAlltoAllV(const void* sb, const void* sc, const void* sd, HcclDataType st, const void* rb, const void* rc, const void* rd, HcclDataType rt, HcclComm cc, aclrtStream s) { auto c = (Comm*)cc; auto p = all(c); auto v = [&](const void* x) { return std::vector<uint64_t>((const uint64_t*)x, (const uint64_t*)x + c->n); }; auto a = v(sc), b = v(sd), d = v(rc), e = v(rd); push(s, [=] { size_t z = esz(st), y = esz(rt); for (auto& x : p.s) put(c, x.first, x.second, (const char*)sb + b[x.first] * z, a[x.first] * z); memmove((char*)rb + e[c->r] * y, (const char*)sb + b[c->r] * z, a[c->r] * z); for (auto& x : p.r) get(c, x.first, x.second, (char*)rb + e[x.first] * y, d[x.first] * y); }); return HCCL_SUCCESS; }
API HcclResult HcclAlltoAll(const void* sb, uint64_t n, HcclDataType st, const void* rb, uint64_t m, HcclDataType rt, HcclComm cc, aclrtStream s) { auto c = (Comm*)cc; std::vector<uint64_t> k(c->n, n), d(c->n), l(c->n, m), e(c->n); for (uint32_t i = 0; i < c->n; i++) { d[i] = i * n; e[i] = i * m; } return HcclAlltoAllV(sb, k.data(), d.data(), st, rb, l.data(), e.data(), rt, cc, s); }
API HcclResult HcclBarrier(HcclComm cc, aclrtStream s) { static float x, y; return HcclAllReduce(&x, &y, 1, HCCL_DATA_TYPE_FP32, HCCL_REDUCE_SUM, cc, s); }
API HcclResult HcclBatchSendRecv(HcclSendRecvItem* it, uint32_t n, HcclComm cc, aclrtStream s) { for (uint32_t k = 0; k < n; k++) if (it[k].sendRecvType == HCCL_SEND) HcclSend(it[k].buf, it[k].count, it[k].dataType, it[k].remoteRank, cc, s); for (uint32_t k = 0; k < n; k++) if (it[k].sendRecvType != HCCL_SEND) HcclRecv(it[k].buf, it[k].count, it[k].dataType, it[k].remoteRank, cc, s); return HCCL_SUCCESS; }
